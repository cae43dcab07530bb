"""Tells whether a child that does not answer is busy, by the processor time of its process tree.

Neighbours: supervision.py tells a slow child from a stalled one by it, health.py by it waits longer for a
token on a CPU. On a GPU a busy loop waits for a hanging kernel, so there it proves nothing.
"""

from __future__ import annotations

import time

from runtime.shared import process_table

# Of one core, which many may share; one that waits for work uses a hundredth.
_BUSY_SHARE = 0.05


class CpuActivity:
    """Processor time since this object was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begun_at, self._used = time.monotonic(), self._seconds()

    def __bool__(self) -> bool:
        took = time.monotonic() - self._begun_at
        return took > 0 and self._seconds() - self._used >= _BUSY_SHARE * took

    def _seconds(self) -> float:
        return process_table.cpu_seconds([self._pid, *process_table.descendants(self._pid)])
