"""Whether a child that gives no answer is at work meanwhile: by the processor time of it and all below it.

Neighbours: supervision.py tells by it what is slow from what stands still, health.py how long to wait for a
token on a CPU. On a GPU a kernel that hangs is waited for by a busy loop: there it says nothing of life.
"""

from __future__ import annotations

import time

from runtime.shared import process_table

# Of one core, which many may share; one that waits for work uses a hundredth.
_BUSY_SHARE = 0.05


class CpuActivity:
    """From its making on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begun_at, self._used = time.monotonic(), self._seconds()

    def __bool__(self) -> bool:
        took = time.monotonic() - self._begun_at
        return took > 0 and self._seconds() - self._used >= _BUSY_SHARE * took

    def _seconds(self) -> float:
        return process_table.cpu_seconds([self._pid, *process_table.descendants(self._pid)])
