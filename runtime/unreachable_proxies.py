"""Prints the variables whose proxy does not answer from this machine, for a shell to unset.

    unset $(python3 -m runtime.unreachable_proxies)

A user's proxy may be reachable from the user's network alone. No address is printed: it may hold a password.
Neighbours: `launcher/backends/ssh/machine_scripts.py` runs it before set-up and keeper. Standard library
only.
"""

from __future__ import annotations

import os
import socket
import sys
from urllib.parse import urlsplit

_NAMES = ("http_proxy", "https_proxy", "all_proxy")
_PORTS = {"https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}
_CONNECT_SECONDS = 5.0


def answers(address: str) -> bool:
    """Whether anything takes a connection at a proxy's address, which may have no scheme and no port."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        place = (parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80))
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def main() -> int:
    given = {name: value for name, value in os.environ.items() if name.lower() in _NAMES and value}
    known = {address: answers(address) for address in set(given.values())}
    dead = sorted(name for name, address in given.items() if not known[address])
    if dead:
        sys.stderr.write(f"not used, because no proxy answers there from this machine: {', '.join(dead)}\n")
        sys.stdout.write(" ".join(dead) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
