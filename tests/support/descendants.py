"""The processes below one, by name: some of them end while they are looked at, and that is no error."""

import contextlib
import os
import signal

import psutil


def named(name: str, pid: int | None = None) -> list[psutil.Process]:
    """The processes below `pid` (default: this one) whose names begin with `name`; what nobody has waited for
    counts. Raises psutil.NoSuchProcess where `pid` itself is gone."""
    found = []
    for process in psutil.Process(pid or os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(name):
                found.append(process)
    return found


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send each of them that is still there a signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
