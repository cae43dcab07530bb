"""A run for agents, its engine scripted and calling tools: `agent_world.py FOLDER`. Ends with stdin.

Says its socket; `FOLDER/heard.jsonl` has what the engine was asked and answered.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.runtime.arbor_wire import Wire
from tests.runtime.tooling_engine import ToolingEngine


def main(folder: str) -> None:
    wire = Wire(Path(folder), ToolingEngine)
    assert isinstance(wire.engine, ToolingEngine)
    wire.engine.heard = Path(folder) / "heard.jsonl"
    print(wire.gateway.socket, flush=True)
    sys.stdin.read()
    wire.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
