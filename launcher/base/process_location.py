"""The location of a process: its computer, that computer's boot, and its PID namespace (a container).

A home may be shared: by the hosts of an NFS home, by a computer and its dev containers, by the distributions
of WSL. A process that cannot be seen from here counts as dead only if it must be. Neighbours: `records.py`
keeps the place of a run, `reachability.py` judges it, `processes.py` names processes by boot. Knows nothing
of runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from launcher.base import computer_identity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = "/proc/{}/ns/pid"
# The same processes are seen; none of its processes can live; or nothing here can tell.
Visibility = Literal["here", "rebooted", "elsewhere"]


@dataclass(frozen=True)
class ProcessLocation:
    """`computer` is a digest that a reboot does not change; `boot` and `pids` (the PID namespace) are as the
    kernel names them, None if it does not. `host` is for people."""

    computer: str
    boot: str | None
    pids: str | None
    host: str

    @staticmethod
    def here() -> ProcessLocation:
        """The location of this process."""
        return _here()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read a record's entry. Fields of a later version are ignored."""
        return cls(**{key: values[key] for key in cls.__dataclass_fields__})

    def visibility_from(self, here: ProcessLocation) -> Visibility:
        """Whether processes of this location can be seen from `here`.

        The boot identifies a kernel; a machine-id may come from a shared image. Another boot of the same
        computer has ended its processes, if it really is the same computer, so the caller must ask for more
        than this word.
        """
        if self.boot == here.boot and (self.boot is not None or self.computer == here.computer):
            return "here" if self.pids == here.pids else "elsewhere"
        return "rebooted" if self.computer == here.computer else "elsewhere"

    def describe(self, here: ProcessLocation) -> str:
        """ "gpubox", or "another container of gpubox" where the kernel is this one."""
        if self.boot is not None and self.boot == here.boot:
            number = "".join(character for character in self.pids or "" if character.isdigit())
            return f"another container of this computer ({self.host}, PID namespace {number or 'unknown'})"
        return f"another computer or container ({self.host})"


@functools.cache
def _here() -> ProcessLocation:
    host = socket.gethostname()
    return ProcessLocation(_computer(host), boot_id(), pid_namespace("self"), host)


@functools.cache
def boot_id() -> str | None:
    """The kernel's name for this boot; None if it has none."""
    if sys.platform == "darwin":
        return _mac_boot_id()
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def pid_namespace(pid: int | str) -> str | None:
    """As "pid:[4026531836]"; None if the system has none, or it may not be read."""
    try:
        return os.readlink(_PID_NAMESPACE.format(pid))
    except OSError:
        return None


def _computer(host: str) -> str:
    """Linux: the machine-id, which nodes or containers of one image share, and the host's name. On a Mac the
    host's name changes with its network, and its network card tells it from others. Elsewhere a network
    changes only what follows the name.
    """
    system = computer_identity.of_the_system() or ""
    known = system if sys.platform == "darwin" and system else f"{system}|{host.partition('.')[0].lower()}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _mac_boot_id() -> str | None:
    size = ctypes.c_size_t(64)
    buffer = ctypes.create_string_buffer(size.value)
    found = ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, 0)
    return buffer.value.decode() or None if found == 0 else None
