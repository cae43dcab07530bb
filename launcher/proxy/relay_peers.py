"""The user who owns the other end of a connection on this computer.

The kernel finds the client's own socket by both addresses; an ordinary user may ask for any user's. Only an
open socket has an owner: for a closed one the kernel may answer 0, which is root. So it is looked up twice,
and the first answer counts if the second still finds the same socket open.
Neighbours: `relay_connection.py` asks, once per connection. Knows nothing of HTTP or of tokens.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_WANTED = struct.Struct("=BBxxI")  # family, protocol, states
_ADDRESSES = struct.Struct("!HH16s16s")  # source and destination: ports, addresses
_ANY_DEVICE_OR_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_STATE = struct.Struct("=xB")
_OWNER = struct.Struct("=II")  # user, inode
_OWNER_OFFSET = 64
_ESTABLISHED = 1
# A kernel that has no such service, or does not let this process ask it.
_NO_SERVICE = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EPERM, errno.EACCES)
# The same in text: IPv4, and IPv4 spoken by an IPv6 socket.
_TABLES = ((Path("/proc/net/tcp"), ""), (Path("/proc/net/tcp6"), "0000000000000000FFFF0000"))
# How the kernel shows every user that this container has no number for.
_OVERFLOW_USER = 65534

Address = tuple[str, int]


class Owner(NamedTuple):
    """The user of an open socket, and the socket itself."""

    user: int
    inode: int


def is_this_users(own: Address, peer: Address) -> bool:
    """Whether the client of a connection from `peer` to `own` belongs to the user that we run as.

    False also if it cannot be told: no Linux, another kind of address, a client that is gone.
    """
    if sys.platform != "linux":
        return False
    try:
        found = _find_owner(own, peer)
        return found is not None and found.user == _our_user() and _find_owner(own, peer) == found
    except (OSError, struct.error, ValueError):
        return False


def _our_user() -> int | None:
    user = os.geteuid()
    return None if user == _OVERFLOW_USER else user


def _find_owner(own: Address, peer: Address) -> Owner | None:
    """The client's socket where it is open, as the kernel knows it now."""
    try:
        asking = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
    except OSError as error:
        if error.errno in _NO_SERVICE:
            return _in_tables(own, peer)
        raise
    with asking:
        asking.send(_question(own, peer))
        return _read(asking.recv(65536, socket.MSG_DONTWAIT))


def _question(own: Address, peer: Address) -> bytes:
    """For one socket by its addresses, the client's first: no table is gone through."""
    ends = (socket.inet_aton(address) for address, _ in (peer, own))
    addresses = _ADDRESSES.pack(peer[1], own[1], *ends)
    body = _WANTED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0xFFFFFFFF) + addresses + _ANY_DEVICE_OR_COOKIE
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


def _read(answer: bytes) -> Owner | None:
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:  # an error: there is no such socket
        return None
    message = answer[_HEADER.size :]
    (state,) = _STATE.unpack_from(message)
    return _open_owner(state, *_OWNER.unpack_from(message, _OWNER_OFFSET))


def _in_tables(own: Address, peer: Address) -> Owner | None:
    """From the kernel's list of all sockets, which takes longer the more there are."""
    for table, before in _TABLES:
        if not table.exists():
            continue
        wanted = [_as_listed(before, peer), _as_listed(before, own)]
        for line in table.read_text().splitlines():
            words = line.split()
            if words[1:3] == wanted:
                return _open_owner(int(words[3], 16), int(words[7]), int(words[9]))
    return None


def _as_listed(before: str, address: Address) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{before}{number:08X}:{address[1]:04X}"


def _open_owner(state: int, user: int, inode: int) -> Owner | None:
    return Owner(user, inode) if state == _ESTABLISHED and inode else None
