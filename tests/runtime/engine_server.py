"""Engines that start in two seconds: forks of one process that has imported vLLM and everything of ours.

    python -m tests.runtime.engine_server --config runtime.json

Reads one JSON object a line, answers one: {} → {"pid": N}; {"poll": N} → {} or {"exit_code": …}. Each fork
is what `runtime.engine.server` becomes once its imports are done. Run by `engines.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from runtime.engine import command, server
from runtime.shared.schema import RuntimeConfig


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
            answer = {"pid": _start(config, args)}
        print(json.dumps(answer), file=out, flush=True)


def _start(config: RuntimeConfig, args: object) -> int:
    command.socket_path(config, 0).unlink(missing_ok=True)  # of the life before
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        server.run(config, 0, args)  # pyright: ignore[reportArgumentType]
    return child


if __name__ == "__main__":
    main()
