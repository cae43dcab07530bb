"""Waiting for something to become true: the one bounded poll of the tests, for threads and for event loops.

Standard library only, since the tests of both environments and the programs on a rig's laptop use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A bound is there to end a test that would hang, never to measure: wide enough for a computer that is busy.
WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.02


def wait_until(
    condition: Callable[[], T], seconds: float = WAIT_SECONDS, what: str | Callable[[], str] = ""
) -> T:
    """The condition's value once it is true; AssertionError with `what` (asked for then) past the bound."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, _missed(seconds, what)
        time.sleep(_POLL_SECONDS)
    return value


async def wait_until_async(
    condition: Callable[[], T], seconds: float = WAIT_SECONDS, what: str | Callable[[], str] = ""
) -> T:
    """`wait_until` for a test inside an event loop, which goes on meanwhile."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, _missed(seconds, what)
        await asyncio.sleep(_POLL_SECONDS)
    return value


def _missed(seconds: float, what: str | Callable[[], str]) -> str:
    return f"not within {seconds:g} s: {what() if callable(what) else what}"
