"""A clock that goes on while this computer sleeps, because a rented machine costs money meanwhile.

Neighbours: `lease.py` gets these times, `run.py` counts deadline and cost by them, `runtime_monitor.py` the
lease. Silence is counted by `time.monotonic`, which stops during sleep: the network of a laptop that wakes up
needs a moment as well.
"""

from __future__ import annotations

import os
import time

from launcher.base.process_location import boot_id

# Linux: since boot. macOS has no such name for it, and its "monotonic" clock counts the sleep.
_AWAKE_OR_ASLEEP: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_AWAKE: int = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since some fixed instant, sleep included. Use differences only."""
    return time.clock_gettime(_AWAKE_OR_ASLEEP)


def asleep_seconds() -> float:
    """How many of the seconds of `boot_seconds` this computer slept."""
    return boot_seconds() - time.clock_gettime(_AWAKE)


def wall_time(begun: float, begun_boot: float | None, boot: str | None) -> float:
    """The time now, by the wall clock as it went at `begun`: one that is set in mid-run moves no deadline.

    `begun_boot`: the boot clock (`boot_seconds`) at that instant, and `boot` whose it is. After a
    reboot, on another computer, or without them it is `time.time()`; so it is in WSL, whose boot clock stands
    still while Windows sleeps.
    """
    if begun_boot is None or boot is None or boot != boot_id() or "microsoft" in os.uname().release.lower():
        return time.time()
    return begun + boot_seconds() - begun_boot
