"""Imports that take long, without the garbage collections that they set off: a quarter of SkyPilot's time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_nothing() -> Iterator[None]:
    """While modules load there is nothing to collect, and later collections leave out what is loaded then.

    For the start of a process: what is garbage when this ends is kept for good.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
