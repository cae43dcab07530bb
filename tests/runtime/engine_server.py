"""Engines that start in two seconds: forks of one process that has imported vLLM and everything of ours.

    python -m tests.runtime.engine_server --config runtime.json

Reads one JSON object a line, answers one: {} → {"pid": N}; {"poll": N} → {} or {"exit_code": …}. Each fork
is what `runtime.engine.server` becomes once its imports are done: for this process's own configuration, or
with {"config": FILE} for another, which then says what it has to say in `engine.log` beside it. Run by
`engines.py`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from runtime.engine import command, server
from runtime.shared.runtime_config import RuntimeConfig


def main() -> None:
    """Import, say so, then fork until stdin ends."""
    config = RuntimeConfig.model_validate_json(Path(sys.argv[2]).read_text())
    args = server.prepare(config, 0)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "poll" in ask:
            ended, status = os.waitpid(ask["poll"], os.WNOHANG)
            answer = {"exit_code": os.waitstatus_to_exitcode(status)} if ended else {}
        else:
            answer = {"pid": _fork_another(Path(ask["config"])) if "config" in ask else _fork(config, args)}
        print(json.dumps(answer), file=out, flush=True)


def _fork(config: RuntimeConfig, args: object) -> int:
    command.socket_path(config, 0).unlink(missing_ok=True)  # of the life before
    child = os.fork()
    if child == 0:
        _be_alone()
        server.run(config, 0, args)
    return child


def _fork_another(file: Path) -> int:
    """An engine of another configuration; what is read at exec only stays as it is here."""
    child = os.fork()
    if child == 0:
        _be_alone()
        log = os.open(file.with_name("engine.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            config = RuntimeConfig.model_validate_json(file.read_text())
            os.environ |= command.environment(config, 0)
            server.run(config, 0, server.prepare(config, 0))
        except BaseException:  # noqa: BLE001 - a fork that returned would be a second server
            traceback.print_exc()
            os._exit(1)
    return child


def _be_alone() -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    main()
