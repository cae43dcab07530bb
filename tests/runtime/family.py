"""A keeper over a supervisor over small real processes, run as a program by the process tests.

`python -m tests.runtime.family keeper|supervisor --config STATE/runtime.json`: the keeper starts this same
file as its supervisor, and that one supervises the `children` the configuration names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from runtime.keeper import Keeper, RunLimits
from runtime.shared.stdin_token import read_token
from runtime.supervision import ChildSpec, RestartPolicy, Supervisor, stop_on


def keeper(config_path: Path) -> int:
    config = json.loads(config_path.read_text())
    command = [sys.executable, "-m", "tests.runtime.family", "supervisor", "--config", str(config_path)]
    limits = RunLimits(config["lease_seconds"], config["deadline_seconds"])
    return Keeper(Path(config["state_dir"]), limits, command, config["grace_seconds"]).run(read_token())


class Alive:
    """For a child that has nothing to ask: up as soon as it runs."""

    note: str | None = None

    def reset(self) -> None:
        """Nothing is remembered."""

    async def __call__(self, pid: int) -> str | None:
        return None if os.path.exists(f"/proc/{pid}") else "gone"


async def supervisor(config_path: Path) -> int:
    config = json.loads(config_path.read_text())
    state_dir = Path(config["state_dir"])
    token = read_token()
    specs = [
        ChildSpec(
            name=name,
            command=command,
            log=state_dir / "logs" / f"{name}.log",
            check=Alive(),
            stdin_line=token,
            stop_seconds=config["stop_seconds"],
            is_vital=name == "vital",
        )
        for name, command in config["children"].items()
    ]
    stop = asyncio.Event()
    stop_on((signal.SIGTERM,), stop.set)
    restarts = RestartPolicy(
        max_restarts=config["restarts"], initial_backoff_seconds=0.05, max_backoff_seconds=0.2
    )
    return await Supervisor(state_dir, specs, restarts).run(stop)


if __name__ == "__main__":
    path = Path(sys.argv[3])
    sys.exit(keeper(path) if sys.argv[1] == "keeper" else asyncio.run(supervisor(path)))
