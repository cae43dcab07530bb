"""Details of running processes: their environment, folder, program, name and ports.

Neighbours: `processes.py` names and ends them; `guardian.py`, `leftovers.py`, `sky_home.py` and `ports.py`
ask. Only this user's processes can be read. Knows nothing of runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from launcher.base import process_location
from launcher.base.processes import ProcessId, all_running

_Answer = TypeVar("_Answer")


def with_variable(variable: str, value: str) -> set[ProcessId]:
    """The living processes that were started with `variable=value` in their environment.

    This process and its ancestors are left out, because the caller is no leftover. Only this user's processes
    can be read; those of others cannot be ours.
    """
    return {process for process, environ in environments() if environ.get(variable) == value}


def in_our_namespace(process: ProcessId) -> bool:
    """Whether it is in our own PID namespace. To a process of a container a path may mean another file."""
    return process_location.pid_namespace(process.pid) == process_location.pid_namespace("self")


def environments() -> Iterator[tuple[ProcessId, dict[str, str]]]:
    """The living processes of this user, each with its initial environment; this process and its ancestors
    are left out."""
    running = all_running()
    parents = {process.pid: parent for process, parent in running.items()}
    own: int | None = os.getpid()
    while own is not None:
        own = parents.pop(own, None)
    for process in running:
        if process.pid in parents and (environ := _query(process, psutil.Process.environ)) is not None:
            yield process, environ


def with_working_folder(folder: Path) -> set[ProcessId]:
    """The living processes, without this one, whose working folder this is, also by a symlink."""
    others = (process for process in all_running() if process.pid != os.getpid())
    real = os.path.realpath(folder)  # as the system names a working folder
    return {process for process in others if _query(process, psutil.Process.cwd) == real}


def runs_from(folder: Path) -> bool:
    """Whether a process runs a program of this folder, whichever symlink either is named by."""
    inside = os.path.realpath(folder) + os.sep
    commands = (_query(process, psutil.Process.cmdline) for process in all_running())
    # The program itself may be a symlink out of the folder, as a virtual environment's Python is.
    places = (os.path.realpath(os.path.dirname(command[0])) for command in commands if command)
    return any(place.startswith(inside) or place + os.sep == inside for place in places)


def name_of(process: ProcessId) -> str:
    """The process's name, as the system has it."""
    return _query(process, psutil.Process.name) or "(gone)"


def _query(process: ProcessId, question: Callable[[psutil.Process], _Answer]) -> _Answer | None:
    """None of one that has ended, and of other users' where only they may ask."""
    try:
        return question(psutil.Process(process.pid))
    except (psutil.Error, OSError):
        return None


def is_stopped(process: ProcessId) -> bool:
    """Whether it is stopped (Ctrl-Z) at this moment, and so makes no progress."""
    return _query(process, psutil.Process.status) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def listens(pid: int, port: int) -> bool:
    """Whether a process of this user's listens on a TCP port. Only its own connections are read: to list
    everybody's takes root on a Mac."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port for one in connections)


def listener(port: int) -> ProcessId | None:
    """This user's process that listens on a TCP port; None if none does."""
    return next((process for process in all_running() if listens(process.pid, port)), None)
