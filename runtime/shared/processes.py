"""Processes that leave nothing behind: death signals, adoption of orphans, ending a whole tree.

Neighbours: keeper.py, supervision.py and tether.py. Linux only (prctl, /proc), standard library only.
Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
            preexec_fn=in_child(death_signal),
        )


def in_child(death_signal: signal.Signals) -> Callable[[], None]:
    """What a child does between fork and exec: take its death signal, undo our signal mask."""
    parent = os.getpid()

    def prepare() -> None:
        die_with(parent, death_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    return prepare


def die_with(parent: int | None, death_signal: signal.Signals) -> None:
    """In a child: get `death_signal` when `parent` dies, from now on, and end if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Process:
    """One line of the machine's process table; times in clock ticks."""

    pid: int
    parent: int
    state: str
    cpu_ticks: int
    started_ticks: int


def look(pid: int) -> Process | None:
    """The process as /proc shows it now; None when it is gone. A zombie is still there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name, in brackets, may itself hold blanks and brackets.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(
        pid=pid,
        parent=int(fields[1]),
        state=fields[0].decode(),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_ticks=int(fields[19]),
    )


def table() -> list[Process]:
    """Every process this machine shows, oldest first."""
    seen = [look(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return sorted((process for process in seen if process), key=lambda process: process.started_ticks)


def children(pid: int) -> list[int]:
    """The direct children of `pid`, oldest first."""
    return [process.pid for process in table() if process.parent == pid]


def descendants(root: int) -> list[int]:
    """Every process below `root`, without the root itself."""
    below: dict[int, list[int]] = {}
    for process in table():
        below.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    waiting = [root]
    while waiting:
        born = below.get(waiting.pop(), [])
        found += born
        waiting += born
    return found


def send(pid: int, number: signal.Signals) -> None:
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
    """SIGKILL everything below this process until nothing is left; the pids that would not go in time.

    Needs `adopt_orphans`: whatever loses its parent on the way falls to us and is found on the next round.
    """
    end = time.monotonic() + bound_seconds
    while left := descendants(os.getpid()):
        for pid in left:
            send(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > end:
            return left
        time.sleep(0.01)
    return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time the processes have used so far, in seconds."""
    ticks = sum(process.cpu_ticks for pid in pids if (process := look(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def at_the_disk(pids: Iterable[int]) -> bool:
    """Whether one of their threads waits in the kernel for what cannot be interrupted (a "D" in /proc).

    So do fsync and a rename while a disk, also one behind a network, takes what it was given. A lock, a pipe
    or a debugger is another state.
    """
    return any(_state(task) == b"D" for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def _state(stat: Path) -> bytes:
    try:
        return stat.read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return b""
