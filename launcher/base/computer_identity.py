"""A stable id of this computer: it tells which rented machines were started from here.

Neighbours: `orphaned_machines.py` labels machines with it. The host's name is not used, because it changes
with a laptop's network and with every container. Only a digest of the id leaves this computer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import uuid
from pathlib import Path

# Beside the runs; made when a machine is first labelled.
FILE = "computer"
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
# A container's machine-id is its image's: the same on every computer that runs it.
_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
_RANDOM_ADDRESS = 1 << 40


def of_this_computer(home: Path) -> str:
    """Read the id from `home`/computer; write one there if there is none yet.

    After the home was deleted the id is the same again if the system has an id of its own. In a container
    only the home tells it from others.
    """
    path = home / FILE
    if kept := _read_id(path):
        return kept
    found = of_the_system() or secrets.token_hex(16)
    aside = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # then the system's id is returned, or no machine is known to be ours
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.write_text(found + "\n", encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # whole, and the first of two that begin at once
        aside.unlink()
    return _read_id(path) or found


def _read_id(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def of_the_system() -> str | None:
    if any(mark.exists() for mark in _CONTAINER):
        return None
    for path in _MACHINE_IDS:
        if found := _read_id(path):
            return found
    if sys.platform == "linux":
        return None
    address = uuid.getnode()  # a network card's, unless Python has made one up
    return None if address & _RANDOM_ADDRESS else f"{address:012x}"
