"""How many cores this process may use.

Neighbours: `cli/doctor.py` and `cli/step_time.py` ask. On Linux a container's or a user's share counts.
"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """At least one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
