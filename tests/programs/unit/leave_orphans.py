"""Leaves short-lived orphans to its parent and waits until they are collected.

The states of the parent's children are in `states` then; or, if that does not come, after some seconds.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

BOUND_SECONDS = 20.0


def siblings() -> list[str]:
    """The states of our parent's children, our own among them."""
    states = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a stranger that has just ended
        if parent == str(os.getppid()):
            states.append(state)
    return states


if __name__ == "__main__":
    for _ in range(3):
        subprocess.run(["sh", "-c", "sleep 0.05 &"])
    end = time.monotonic() + BOUND_SECONDS
    while len(siblings()) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    Path("states").write_text(str(siblings()))
