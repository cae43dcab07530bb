"""A heartbeat file: the process that attends a run renews it, for other computers, which cannot see the
process.

    runs/<id>/heartbeat          renewed by the run's launch
    runs/<id>/.teardown-beat     renewed by the process that ends the run, on any computer

Two computers' clocks are never compared: the file's age is measured by the file system alone, with a second
file made for the purpose. Neighbours: `run.py` and the process that ends a run (`teardown_lock.py`) keep it
beating, `reachability.py` asks. Nothing here raises: a full disk ends no run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

FILE = "heartbeat"
# One of its own: an attempt to end a run is no sign that its launch lives.
TEARDOWN_FILE = ".teardown-beat"
INTERVAL_SECONDS = 10.0
# Several beats may be late: a disk of the network stands still for a while.
STALE_SECONDS = 60.0
_END_SECONDS = 2.0
_FILE_BYTES = 24


@contextlib.contextmanager
def keep_beating(folder: Path, file: str = FILE) -> Iterator[None]:
    """The run's folder has a beat at once and every so often until the block is over."""
    over = threading.Event()
    _beat(folder / file, 0)

    def beat() -> None:
        count = 0
        while not over.wait(INTERVAL_SECONDS):
            _beat(folder / file, count := count + 1)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_SECONDS)


def age_seconds(folder: Path, file: str = FILE) -> float | None:
    """Seconds since the last beat, by the file system's clock; None if there was none, or the age cannot
    be measured."""
    try:
        # Opened, because NFS asks the server again for a file's attributes when it is opened.
        with (folder / file).open("rb") as last:
            beat = os.fstat(last.fileno()).st_mtime
        with tempfile.TemporaryFile(dir=folder) as now:
            os.utime(now.fileno())
            return max(0.0, os.fstat(now.fileno()).st_mtime - beat)
    except OSError:
        return None


def _beat(path: Path, count: int) -> None:
    """Overwrite the file in place, which takes no new room; if that fails, set its time alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.utime(descriptor)
            os.pwrite(descriptor, f"{os.getpid()} {count}".ljust(_FILE_BYTES).encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
