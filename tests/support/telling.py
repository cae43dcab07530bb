"""What a program of the tests says while it works: each line with the seconds since it began."""

from __future__ import annotations

import time

_BEGUN = time.monotonic()


def told(what: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:.1f}] {what}", flush=True)
