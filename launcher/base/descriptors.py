"""Waits until descriptors can be read or written, whatever their numbers are.

`select.select` takes none past 1,023, and a process with a thousand requests under way gives out higher ones.
Where it can be asked it is: of terminals `poll` knows nothing on a Mac. Whoever is at its end is ready too.
Neighbours: whoever reads a pipe of another process. Knows nothing of what is read.
"""

from __future__ import annotations

import errno
import math
import os
import select
from collections.abc import Sequence

_SELECT_LIMIT = 1024


def readable(descriptors: Sequence[int], seconds: float | None = None) -> list[int]:
    """Those that can be read now, or within so many seconds (None: however long it takes).

    Raises OSError where one is not open.
    """
    if max(descriptors) < _SELECT_LIMIT:
        return select.select(descriptors, [], [], seconds)[0]
    return _polled(descriptors, select.POLLIN, seconds)


def until_writable(descriptor: int) -> None:
    """Wait until it takes something. Raises OSError where it is not open."""
    if descriptor < _SELECT_LIMIT:
        select.select([], [descriptor], [])
    else:
        _polled([descriptor], select.POLLOUT, None)


def _polled(descriptors: Sequence[int], events: int, seconds: float | None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    ready = poll.poll(None if seconds is None else math.ceil(seconds * 1000))
    if any(found & select.POLLNVAL for _, found in ready):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return [descriptor for descriptor, _ in ready]
