"""Trainers that start at once: forks of one process that has imported torch and torchtune already.

Reads one JSON object a line, answers one a line. Run by `trainers.py`, in the runtime's environment:

    {"command": trainer_command(…), "log": path, "failpoint": text}   → {"pid": N}
    {"poll": N}                                                        → {} or {"exit_code": …}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from runtime.recipes import tune
from runtime.shared import failpoints, processes


def main() -> None:
    """Import what a trainer imports, say so, then fork until stdin ends."""
    sys.modules.update({name: tune.SkippedModule(name) for name in ("datasets", "datasets.distributed")})
    import torch

    from runtime.recipes import grpo_lora  # noqa: F401 - what takes so long

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        answer = _poll(ask["poll"]) if "poll" in ask else {"pid": _start(ask)}
        print(json.dumps(answer), flush=True)


def _start(ask: dict[str, Any]) -> int:
    in_child = processes.preexec(signal.SIGKILL)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            in_child()
            os.setsid()
            log = os.open(ask["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
                os.dup2(source, descriptor)
            _train(ask)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must not run on into its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def _train(ask: dict[str, Any]) -> None:
    """What `tune run` does with the same command."""
    from omegaconf import OmegaConf

    from runtime.recipes.grpo_lora import GRPOLoRARecipe

    failpoints._ours = failpoints.Failpoints(ask["failpoint"])  # a fork gets its own
    words = ask["command"]
    after = words.index("--config") + 1
    config = OmegaConf.merge(OmegaConf.load(words[after]), OmegaConf.from_dotlist(words[after + 1 :]))
    recipe = GRPOLoRARecipe(config)
    recipe.setup()
    recipe.train()
    recipe.cleanup()


def _poll(pid: int) -> dict[str, int]:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return {"exit_code": os.waitstatus_to_exitcode(status)} if ended else {}


if __name__ == "__main__":
    main()
