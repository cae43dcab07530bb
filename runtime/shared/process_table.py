"""The machine's processes as /proc shows them: their tree, their processor time, waits for a disk.

Neighbours: `processes.py` starts and ends them; `health.py`, `keeper.py` and `cpu_activity.py` look here.
Linux only, standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One line of the machine's process table; times in clock ticks."""

    pid: int
    parent: int
    state: str
    cpu_ticks: int
    started_ticks: int


def read_process(pid: int) -> Process | None:
    """The process as /proc shows it now; None when it is gone. A zombie is still there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name, in brackets, may itself hold blanks and brackets.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        state=fields[0].decode(),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_ticks=int(fields[19]),
    )


def table() -> list[Process]:
    """Every process this machine shows, oldest first."""
    seen = [read_process(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return sorted((process for process in seen if process), key=lambda process: process.started_ticks)


def children(pid: int) -> list[int]:
    """The direct children of `pid`, oldest first."""
    return [process.pid for process in table() if process.parent == pid]


def descendants(root: int) -> list[int]:
    """Every process below `root`, without the root itself."""
    below: dict[int, list[int]] = {}
    for process in table():
        below.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    waiting = [root]
    while waiting:
        born = below.get(waiting.pop(), [])
        found += born
        waiting += born
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time the processes have used so far, in seconds."""
    ticks = sum(process.cpu_ticks for pid in pids if (process := read_process(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def is_waiting_for_disk(pids: Iterable[int]) -> bool:
    """Whether one of their threads is in an uninterruptible wait in the kernel (a "D" in /proc).

    An fsync or a rename waits so while a disk, also one behind a network, takes the data. A lock, a pipe or a
    debugger is another state.
    """
    return any(_state(task) == b"D" for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def _state(stat: Path) -> bytes:
    try:
        return stat.read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return b""
