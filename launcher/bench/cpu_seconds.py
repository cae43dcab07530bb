"""Processor seconds by process, of a running program and its descendants.

Neighbours: `child.py` samples, `side_run.py` asks for an interval. A process's work between its last sample
and its end is missed; compare the sum with the whole computer's.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import defaultdict
from pathlib import Path

import psutil

from launcher.bench.this_computer import busy_seconds

ALL = "all of the computer"


class CpuSeconds:
    """Sums that only grow, by process and time."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._sums: list[dict[str, float]] = []
        self._of_each: dict[tuple[int, float], tuple[str, float]] = {}
        self._began = busy_seconds()

    def sample(self, pid: int) -> None:
        """Sample a process and its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                self._sample_process(process)
        sums = defaultdict[str, float](float)
        for name, seconds in self._of_each.values():
            sums[name] += seconds
        self._times.append(time.time())
        self._sums.append({**sums, ALL: busy_seconds() - self._began})

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Each process's seconds in an interval, as near as the samples are."""
        before, after = self._at(began), self._at(ended)
        return {name: after[name] - before.get(name, 0.0) for name in after}

    def _sample_process(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            key = (process.pid, process.create_time())
            times = process.cpu_times()
            # A process may be another program than at the first look, and name itself while it works.
            self._of_each[key] = (_name(process), times.user + times.system)

    def _at(self, when: float) -> dict[str, float]:
        """The sums then, along a line between the looks before and after."""
        at = bisect.bisect_left(self._times, when)
        if not self._times or at == 0:
            return {}
        if at == len(self._times):
            return self._sums[-1]
        sooner, later = self._sums[at - 1], self._sums[at]
        share = (when - self._times[at - 1]) / (self._times[at] - self._times[at - 1])
        both = defaultdict(float, sooner)
        return {name: both[name] + share * (value - both[name]) for name, value in later.items()}


def _name(process: psutil.Process) -> str:
    """The module or script that a Python runs, or else the process's own name."""
    words = process.cmdline()
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script:
        return Path(script).name
    return " ".join(words[:1]) if len(words) == 1 else process.name()
