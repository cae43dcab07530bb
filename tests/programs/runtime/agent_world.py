"""A run for agents, its engine scripted and calling tools: `agent_world.py FOLDER`. Ends with stdin.

Says its socket; `FOLDER/heard.jsonl` has what the engine was asked and answered.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runtime.gateway_run import GatewayRun
from tests.runtime.tooling_engine import ToolingEngine


def main(folder: str) -> None:
    run = GatewayRun(Path(folder), ToolingEngine)
    assert isinstance(run.engine, ToolingEngine)
    run.engine.heard = Path(folder) / "heard.jsonl"
    print(run.gateway.socket, flush=True)
    sys.stdin.read()
    run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
