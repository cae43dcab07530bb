"""Keeps this computer awake for a short while, where the system allows it; never required.

Neighbours: `backends/cloud_machine.py` asks for it while a machine depends on this computer alone.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

# Each keeps the computer awake as long as its command runs: `cat`, until our end of the pipe closes.
_INHIBITORS = (
    ("systemd-inhibit", "--what=sleep:idle:handle-lid-switch", "--who=launch", "--mode=block"),
    ("caffeinate", "-i", "-s"),
)
_END_SECONDS = 5.0


@contextlib.contextmanager
def inhibit_sleep(why: str) -> Iterator[None]:
    """Keep the computer awake inside the block, also if this process is killed in it. Does nothing on a
    system that has no such inhibitor."""
    held = _hold(why)
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                assert held.stdin is not None
                held.stdin.close()
                held.wait(_END_SECONDS)


def _hold(why: str) -> subprocess.Popen[bytes] | None:
    for tool, *words in _INHIBITORS:
        if shutil.which(tool) is None:
            continue
        why_option = [f"--why={why}"] if tool == "systemd-inhibit" else []
        with contextlib.suppress(OSError):
            return subprocess.Popen(
                [tool, *words, *why_option, "cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us
            )
    return None
