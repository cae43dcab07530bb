"""The run's token: each process of the runtime gets it as the first line of its stdin.

Standard library only: the keeper reads it too.
"""

from __future__ import annotations

import os
import select
import time

TOKEN_SECONDS = 30.0


def read_token(descriptor: int = 0, bound_seconds: float = TOKEN_SECONDS) -> bytes:
    """The first line of stdin, without its end; b"" when none comes within the bound."""
    line = b""
    end = time.monotonic() + bound_seconds
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        chunk = os.read(descriptor, 1) if ready else b""
        if not chunk:
            return b""
        line += chunk
    return line.strip()
