"""A clock that goes on while this computer sleeps: a rented machine costs money meanwhile.

Neighbours: `lease.py` is given these, `run.py` counts deadline and cost by them, `runtime_monitor.py` the
lease. How long somebody has been silent is counted by `time.monotonic`, which stands still meanwhile: the
network of a laptop that wakes up needs a moment as well. Knows nothing of what is counted.
"""

from __future__ import annotations

import time

# Linux: since boot. macOS has no such name for it, and its "monotonic" clock counts the sleep.
_AWAKE_OR_ASLEEP: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_AWAKE: int = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since some fixed instant, those asleep included; good for differences only."""
    return time.clock_gettime(_AWAKE_OR_ASLEEP)


def asleep_seconds() -> float:
    """Those of them that were slept through."""
    return boot_seconds() - time.clock_gettime(_AWAKE)
