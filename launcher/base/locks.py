"""File locks between processes, with a bounded wait: the owner may be stopped (Ctrl-Z) or hang.

Neighbours: `records.py` and `results_copy.py` hold these. The system frees them when the holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

OWNER_SECONDS = 20.0
_POLL_SECONDS = 0.02


class HeldLock:
    """A lock that is held. Its owner calls `touch` now and then while it works for long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def touch(self) -> None:
        """Show the processes that wait for the lock that the owner still works."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)


def acquire(descriptor: int, path: object, bound_seconds: float | None = None) -> None:
    """Lock an open file or folder for this process alone. Raises TimeoutError, an OSError, when its holder
    has shown no sign of life (`Held.touch`) for so long."""
    bound = OWNER_SECONDS if bound_seconds is None else bound_seconds
    end = time.monotonic() + bound
    sign = os.fstat(descriptor).st_mtime_ns
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if (now := os.fstat(descriptor).st_mtime_ns) != sign:
                sign, end = now, time.monotonic() + bound
            if time.monotonic() > end:
                text = f"another process has held the lock for {bound:.0f} s: is a launch stopped (Ctrl-Z)?"
                raise TimeoutError(errno.ETIMEDOUT, text, str(path)) from None
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def exclusive(folder: Path, bound_seconds: float | None = None) -> Iterator[HeldLock]:
    """Hold a folder's lock: a file beside it, opened for writing. A folder cannot be, and NFS locks nothing
    else for one process alone. Raises TimeoutError, an OSError, past the bound."""
    descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        acquire(descriptor, folder, bound_seconds)
        yield HeldLock(descriptor)
    finally:
        os.close(descriptor)
