"""Processes that leave nothing behind: death signals, adoption of orphans, ending a whole tree.

Neighbours: keeper.py, supervision.py and tether.py. Linux only (prctl, /proc), standard library only.
Knows nothing of the processes' work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from runtime.shared.process_table import descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here, not in the child between fork and exec, where dlopen could meet a held lock.
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def adopt_orphans() -> None:
    """Make this process the one its descendants fall to when their own parent dies (a "subreaper")."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def spawn(
    command: list[str],
    *,
    death_signal: signal.Signals,
    log: Path,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    environ: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own; it gets `death_signal` when this process dies.

    stdout and stderr are appended to `log`. Call it from the main thread: the kernel sends the death signal
    when the *thread* that forked ends.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
            preexec_fn=preexec(death_signal),
        )


def preexec(death_signal: signal.Signals) -> Callable[[], None]:
    """The child's steps between fork and exec: take its death signal, undo our signal mask."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent, death_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    return prepare


def die_with_parent(parent: int | None, death_signal: signal.Signals) -> None:
    """In a child: get `death_signal` when `parent` dies, from now on, and end if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap() -> dict[int, int]:
    """Collect every dead child: pid → exit code (negative: the signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def kill_descendants(bound_seconds: float = 10.0) -> list[int]:
    """SIGKILL everything below this process until nothing is left. Returns the pids that did not go in time.

    Needs `adopt_orphans`: a process that loses its parent on the way becomes ours and is found on the next
    round.
    """
    end = time.monotonic() + bound_seconds
    while left := descendants(os.getpid()):
        for pid in left:
            signal_process(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > end:
            return left
        time.sleep(0.01)
    return []
