"""Ports of 127.0.0.1 that no other test of this computer takes, in this suite or in one beside it."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Below those from which the system takes one for whoever connects somewhere.
_PORTS = range(12000, 30000)
# Held open: the system frees the locks when this process ends, however it ends.
_held: list[int] = []


def free_port() -> int:
    """A port nobody listens on and nobody else is given while this process lives."""
    folder = Path(tempfile.gettempdir()) / "slipway-test-ports"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.choice(_PORTS)
        descriptor = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(descriptor)
            continue
        _held.append(descriptor)
        return port
