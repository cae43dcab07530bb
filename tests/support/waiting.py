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
WAIT_SECONDS = 180.0
# Soon at first, then ever more rarely: some conditions look at every process of a computer that is busy.
SOONEST_SECONDS = 0.02
_RAREST_SECONDS = 0.25
_SHARE = 0.02


def wait_until(
    condition: Callable[[], T | None],
    seconds: float = WAIT_SECONDS,
    what: str | Callable[[], str] = "",
    *,
    rarest_seconds: float = _RAREST_SECONDS,
) -> T:
    """The condition's value once it is true; AssertionError with `what` (asked for then) past the bound.

    `rarest_seconds`: at least so often it is looked at; SOONEST_SECONDS for what is true for a moment only.
    """
    begun = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - begun
        assert waited < seconds, _missed(seconds, what)
        time.sleep(min(_pause(waited), rarest_seconds))
    return value


async def wait_until_async(
    condition: Callable[[], T | None], seconds: float = WAIT_SECONDS, what: str | Callable[[], str] = ""
) -> T:
    """`wait_until` for a test inside an event loop, which goes on meanwhile."""
    begun = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - begun
        assert waited < seconds, _missed(seconds, what)
        await asyncio.sleep(_pause(waited))
    return value


def _pause(waited: float) -> float:
    return min(_RAREST_SECONDS, max(SOONEST_SECONDS, _SHARE * waited))


def _missed(seconds: float, what: str | Callable[[], str]) -> str:
    return f"not within {seconds:g} s: {what() if callable(what) else what}"
