"""The teardown lock of a run: one process ends it at a time; others see its progress and wait.

    runs/<id>/.teardown     locked by the process that ends the run; its content names owner and progress

Two processes that end one machine would meet in one SkyPilot home. The second one waits and shows it. When
its turn comes it reads the record again, and mostly nothing is left to do.
Neighbours: `launcher/run/ending.py`, `guardian.py` and `take_down.py` end runs, `launch down` reads the
owner; `records.py` makes the file with the run, so that a full disk does not stop a teardown. The system
frees the lock when its holder dies. Knows nothing of machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.base import process_inspection
from launcher.base.errors import TeardownUnverified
from launcher.base.process_location import ProcessLocation
from launcher.base.processes import ProcessId
from launcher.records import heartbeat

FILE = ".teardown"
# The progress that `launch` reports while it cannot copy the results of a machine that would take them along.
# Another version of ours compares it as it stands in the file: the text stays.
WAITING_FOR_RESULTS = "waiting for results that cannot be brought home"
# A holder that is stopped (Ctrl-Z) is waited for so long: each of its own steps is bounded, so is no other.
STUCK_SECONDS = 30.0
_PROGRESS_SECONDS = 20.0
# The text after it changes all the time, and is shown now and then.
_DETAIL = ": "
_POLL_SECONDS = 0.1
# Written whole over the old content: that takes no new room on a disk.
_FILE_BYTES = 1024


@dataclass(frozen=True)
class LockOwner:
    """The owner: "launch", "guardian", "down", "gc" or "resume", and its process; `doing` in words.
    `place`: where the process is; None from older versions, whose processes are here."""

    who: str
    process: ProcessId
    doing: str
    place: ProcessLocation | None = None

    @property
    def host(self) -> str | None:
        """Where its process is not seen from here, the name of its computer or container."""
        here = self.place is None or self.place.visibility_from(ProcessLocation.here()) == "here"
        return None if here or self.place is None else self.place.host

    def describe(self) -> str:
        """ "gc (pid 7) is ending it: down"."""
        on = f" on {self.host}" if self.host else ""
        return f"{self.who} (pid {self.process.pid}{on}) is ending it: {self.doing}"

    def is_stuck(self, folder: Path) -> bool:
        """Whether its process is stopped, and so makes no progress. If the process cannot be seen from here:
        whether the run's folder has no sign of its life."""
        if self.host is None:
            return process_inspection.is_stopped(self.process)
        age = heartbeat.age_seconds(folder, heartbeat.TEARDOWN_FILE)
        return age is None or age > heartbeat.STALE_SECONDS


class LockHandle:
    """The held teardown lock of a run. `descriptor` None: the lock could not be had."""

    def __init__(self, descriptor: int | None, who: str) -> None:
        self._descriptor = descriptor
        self._who = who

    def report(self, what: str) -> None:
        """Report the progress to the processes that wait. An error is ignored."""
        with contextlib.suppress(OSError):  # also where this process may open no more files
            content = dataclasses.asdict(LockOwner(self._who, ProcessId.own(), what, ProcessLocation.here()))
            self._write(json.dumps(content).encode())

    def reporting(self, what: str, progress: Callable[[str], None]) -> Callable[[str], None]:
        """A progress callback that also reports to the processes that wait. Raises nothing."""

        def tell(line: str) -> None:
            self.report(f"{what}{_DETAIL}{line}")
            with contextlib.suppress(Exception):
                progress(line)

        return tell

    def release(self) -> None:
        """Clear the owner: the teardown is over."""
        self._write(b"")

    def _write(self, text: bytes) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the waiting processes then know less, and wait all the same
                os.pwrite(self._descriptor, text.ljust(_FILE_BYTES), 0)


def create(folder: Path) -> None:
    """The file, with its room on the disk, while there is some. Raises OSError."""
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, b"".ljust(_FILE_BYTES), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_waiting(other: LockOwner | None) -> None:
    """The default of `look`: keep waiting for the owner."""


@contextlib.contextmanager
def exclusive(
    folder: Path,
    who: str,
    note: Callable[[str], None],
    *,
    insist: bool = False,
    look: Callable[[LockOwner | None], object] = keep_waiting,
) -> Iterator[LockHandle]:
    """Hold the teardown lock of a run's folder; waits for its owner, and shows who it is.

    Raises TeardownUnverified when the owner made no progress for long. `insist`: then go on beside it,
    because a paid machine must not wait for a stopped process. `look` is called during the wait with the
    owner, and may raise.
    """
    descriptor = _open(folder)
    lock = LockHandle(None, who)
    try:
        if descriptor is not None and _wait(descriptor, folder, note, insist, look):
            lock = LockHandle(descriptor, who)
        lock.report("it has begun")
        with heartbeat.keep_beating(folder, heartbeat.TEARDOWN_FILE):
            yield lock
    finally:
        lock.release()
        if descriptor is not None:
            os.close(descriptor)


def owner(folder: Path) -> LockOwner | None:
    """The process that is ending the run of a folder now; None if there is none or it is unknown."""
    descriptor = _open(folder)
    if descriptor is None:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # the folder is gone, or a full disk has no room for a run of an older version
        return None


def _wait(
    descriptor: int,
    folder: Path,
    note: Callable[[str], None],
    insist: bool,
    look: Callable[[LockOwner | None], object],
) -> bool:
    """Wait for the lock; False if it was not acquired."""
    run = folder.name
    last_noted: str | None = None
    noted_at, still_since = 0.0, None
    while not _try_lock(descriptor):
        now = time.monotonic()
        other = _read(descriptor)
        look(other)
        text = "another process is ending it" if other is None else other.describe()
        what = text if other is None else f"{other.who} {other.doing.partition(_DETAIL)[0]}"
        if what != last_noted or now - noted_at > _PROGRESS_SECONDS:
            note(f"{run}: {text}; waiting")
            last_noted, noted_at = what, now
        if other is not None and not other.is_stuck(folder):
            still_since = None
        elif still_since is None:
            still_since = now
        elif now - still_since > STUCK_SECONDS:
            if insist:
                note(f"{run}: {text}, but it is stuck; continuing without it")
                return False
            raise _stuck(run, text, other)
        time.sleep(_POLL_SECONDS)
    return True


def _stuck(run: str, text: str, other: LockOwner | None) -> TeardownUnverified:
    hint = "ps -ef | grep launch" if other is None else f"kill -CONT {other.process.pid}"
    hint = f"launch status {run}" if other is not None and other.host else hint
    return TeardownUnverified(f"could not verify that {run} is down", f"{text}, but it is stuck", hint)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks: there is no owner to ask
        return True
    return True


def _read(descriptor: int) -> LockOwner | None:
    try:
        content = json.loads(os.pread(descriptor, _FILE_BYTES, 0))
        place = ProcessLocation.from_dict(content["place"]) if content.get("place") else None
        found = LockOwner(str(content["who"]), ProcessId(**content["process"]), str(content["doing"]), place)
        return found if found.host or found.process.alive() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
