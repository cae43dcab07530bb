"""The processes below one, by name: some of them end while they are looked at, and that is no error.

The lanes of a whole run are below its pytest, and rented machines with their own sshd and rsync below the
lanes. Those belong to other tests: nobody finds them here.
"""

import contextlib
import os
import signal

import psutil

from tests.support import lane_reports


def named(name: str, pid: int | None = None) -> list[psutil.Process]:
    """The processes below `pid` (default: this one) whose names begin with `name`; what nobody has waited for
    counts. Raises psutil.NoSuchProcess where `pid` itself is gone."""
    root = psutil.Process(pid or os.getpid())
    others = {process.pid for lane in filter(_is_lane, root.children()) for process in _below(lane)}
    return [process for process in _below(root) if process.pid not in others and _is_named(process, name)]


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send each of them that is still there a signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_lane(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return lane_reports.__name__ in process.cmdline()
    return False


def _is_named(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith(name)
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []
