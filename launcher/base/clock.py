"""A clock that goes on while this computer sleeps, because a rented machine costs money meanwhile.

Neighbours: `lease.py` gets these times, `run.py` counts deadline and cost by them, `runtime_monitor.py` the
lease. Silence is counted by `time.monotonic`, which stops during sleep: the network of a laptop that wakes up
needs a moment as well.
"""

from __future__ import annotations

import time

# Linux: since boot. macOS has no such name for it, and its "monotonic" clock counts the sleep.
_AWAKE_OR_ASLEEP: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_AWAKE: int = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since some fixed instant, sleep included. Use differences only."""
    return time.clock_gettime(_AWAKE_OR_ASLEEP)


def asleep_seconds() -> float:
    """How many of the seconds of `boot_seconds` this computer slept."""
    return boot_seconds() - time.clock_gettime(_AWAKE)
