"""A pytest plugin for a lane: its tests begin when the computer has a place for it.

Loaded with `-p tests.support.places` beside `lane_reports.py`. A suite alone has a place for each of its
lanes and waits for nothing. Of suites side by side, one's lanes begin as the other's end: engines, trainers
and machines of two take more memory than most computers have, and what they are bounded by, time.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

# What a lane keeps busy, in processors and in bytes of memory.
_PROCESSORS = 0.4
_BYTES = 5 * 2**29
_POLL_SECONDS = 0.5
# Held while this process lives: the system gives the place back, however it ends.
_held: list[int] = []


def places(lanes: int) -> int:
    """How many lanes this computer has room for; all of one suite's, however small it is."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(lanes, min(int((os.cpu_count() or 1) / _PROCESSORS), memory_bytes // _BYTES))


def take(folder: Path, count: int) -> int:
    """Wait for one of `count` places, which all who name the same folder share; its number.

    It is this process's alone: what it forks has none (POSIX record locks).
    """
    while (found := _try(folder, count)) is None:
        time.sleep(_POLL_SECONDS)
    number, descriptor = found
    _held.append(descriptor)
    return number


def are_taken(folder: Path, count: int) -> bool:
    """Whether a lane that began now would wait."""
    found = _try(folder, count)
    if found is not None:
        os.close(found[1])
    return found is None


def _try(folder: Path, count: int) -> tuple[int, int] | None:
    """A free place's number and its locked file; None if there is none."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in range(count):
        descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return number, descriptor
    return None


def of_this_computer() -> tuple[Path, int]:
    """The folder of the places that all suites here share, and how many there are."""
    from tests.support.lanes import LANES

    return Path(tempfile.gettempdir()) / f"slipway-places-{os.getuid()}", places(len(LANES))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Before the first test of the lane."""
    take(*of_this_computer())
