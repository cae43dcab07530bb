"""What a process listens on, whatever network namespace it is in: by /proc alone.

Neighbours: `test_secrets.py` asks it of every process of a rig.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path

_LISTENING = "0A"
_ACCEPTS = 0x10000
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses(pid: int) -> set[Address]:
    """The addresses of its TCP sockets that listen."""
    own = _sockets(pid)
    found: set[Address] = set()
    for table in ("tcp", "tcp6"):
        for line in _lines(pid, table):
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in own:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def unix_sockets(pid: int) -> set[Path]:
    """The paths of its Unix sockets that listen, as they are from here; abstract ones have none."""
    own = _sockets(pid)
    found: set[Path] = set()
    for line in _lines(pid, "unix"):
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS and fields[6] in own and len(fields) > 7 and fields[7][0] == "/":
            found.add(Path(f"/proc/{pid}/root{fields[7]}"))
    return found


def _sockets(pid: int) -> set[str]:
    """The inodes of its sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _lines(pid: int, table: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    return []


def _address(coded: str) -> Address:
    """The kernel's hex: words of four bytes, each in the order of the processor."""
    raw = bytes.fromhex(coded)
    packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(packed)
    return (getattr(found, "ipv4_mapped", None) or found) if len(raw) > 4 else found
