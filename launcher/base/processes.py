"""Processes by pid *and* start time: their identity, their tree, their end.

Neighbours: `records.py` stores these identities; `guardian.py`, `minder.py` and `backends/local_machine.py`
end trees, `process_inspection.py` has details. Nothing else in the launcher lists processes. The system
reuses a pid, but not a pid with its start time. Linux keeps start times in ticks since boot, so an identity
holds the boot's id as well. Knows nothing of runs or of the processes' work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.base import process_location

_POLL_SECONDS = 0.02
# Every look reads the state of all processes of the computer: often at first, then more rarely.
_MAX_POLL_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded and looked up here, never first in the child of a process with threads: one of those may hold the
# loader's lock at the fork.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL = _LIBC.prctl if sys.platform == "linux" else None


@dataclass(frozen=True, order=True)
class ProcessId:
    """One process that was running once, never another one with the same pid."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The running process with this pid; None when there is none (a zombie has ended)."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        found = cls.of(os.getpid())
        assert found is not None  # we are running
        return found

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this very process; nothing happens when it has ended."""
        try:
            if not hasattr(os, "pidfd_open"):
                if self.alive():
                    os.kill(self.pid, number)
                return
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.alive():  # asked while the descriptor holds the pid: no other process can take it
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
        except ProcessLookupError:
            return


def tree(roots: Iterable[ProcessId]) -> set[ProcessId]:
    """The living processes among `roots` and everything below them."""
    running = all_running()
    below: dict[int, list[ProcessId]] = {}
    for process, parent in running.items():
        below.setdefault(parent, []).append(process)
    waiting = [root for root in roots if root in running]
    found = set(waiting)
    while waiting:
        new = [child for child in below.get(waiting.pop().pid, ()) if child not in found]
        found.update(new)
        waiting.extend(new)
    return found


def end(
    find: Callable[[], set[ProcessId]], grace_seconds: float, kill_seconds: float = 5.0
) -> set[ProcessId]:
    """Send TERM to the processes that `find` returns and KILL after the grace, until it returns none. Returns
    those that are still alive.

    `find` is called in each round, so a child born meanwhile is ended too. A process found once is followed
    even if its parent's death hides it from `find`.
    """
    begun = time.monotonic()
    pause = _POLL_SECONDS
    known: set[ProcessId] = set()
    while True:
        now = time.monotonic() - begun
        left = {process for process in tree(known | find()) if process.pid != os.getpid()}
        if not left or now > grace_seconds + kill_seconds:
            return left
        for process in left - known:
            process.send(signal.SIGTERM)
        if now >= grace_seconds:
            for process in left:
                process.send(signal.SIGKILL)
        known |= left
        time.sleep(pause)
        pause = min(1.5 * pause, _MAX_POLL_SECONDS)


def wait_for_end(process: ProcessId, seconds: float) -> bool:
    """Wait for its end for at most `seconds`; whether it ended."""
    bound = time.monotonic() + seconds
    while process.alive():
        if time.monotonic() > bound:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def adopt_orphans() -> None:
    """Linux: descendants whose parent dies become our children, so none gets out of sight."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Linux, in a child before its exec: get `number` when the thread of `parent` that forked us ends."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the line above
            os.kill(os.getpid(), number)


def all_running() -> dict[ProcessId, int]:
    """Every running process with its parent's pid."""
    seen = ((pid, _stat(pid)) for pid in psutil.pids())
    return {ProcessId(pid, look[0]): look[1] for pid, look in seen if look is not None}


def _started(pid: int) -> str | None:
    look = _stat(pid)
    return None if look is None else look[0]


def _stat(pid: int) -> tuple[str, int] | None:
    """When the process with this pid started, as an opaque text, and its parent; None when none runs."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # Field 2, the command in brackets, may itself hold blanks and brackets: count from its end.
        fields = stat.rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else (f"{_boot()}-{fields[19].decode()}", int(fields[1]))
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.2f}", process.ppid() or 0
    except psutil.NoSuchProcess:
        return None


def _boot() -> str:
    return (process_location.boot_id() or "")[:8]


def _prctl(option: int, value: int) -> None:
    if _PRCTL is not None and _PRCTL(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
