"""This computer's cores, and the load by other processes.

Neighbours: `runs.py` looks before and after each run, `table_footnotes.py` reports it. Linux only, as runs on
this computer are. Knows nothing of the measurements.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

# Of all cores together; an idle desktop is at a few hundredths.
BUSY_SHARE = 0.15
_SAMPLE_SECONDS = 2.0


def described() -> dict[str, Any]:
    """The computer's description that belongs beside figures."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": _processor(),
        "python": platform.python_version(),
    }


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def busy_share(seconds: float = _SAMPLE_SECONDS) -> float:
    """The share of all cores that is in use now. Ask while nothing of ours runs: a load average still
    includes processes that ended a minute ago."""
    before, began = busy_seconds(), time.monotonic()
    time.sleep(seconds)
    return share(busy_seconds() - before, time.monotonic() - began)


def share(computed: float, seconds: float) -> float:
    """The share of all cores that so many computed seconds are."""
    return round(computed / (seconds * (os.cpu_count() or 1)), 3)


def busy_seconds() -> float:
    """The processor seconds of all cores since the computer started."""
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is in the user's already.
    return sum(times) - waiting - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
