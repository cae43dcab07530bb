"""Waits until file descriptors can be read or written, whatever their numbers are.

`select.select` refuses descriptors above 1,023, and a process with a thousand open requests has such.
`select` is used wherever it can be, because `poll` does not know terminals on a Mac. A descriptor at its end
counts as ready.
Neighbours: every reader of another process's pipe.
"""

from __future__ import annotations

import errno
import math
import os
import select
from collections.abc import Sequence

_SELECT_LIMIT = 1024


def wait_readable(descriptors: Sequence[int], seconds: float | None = None) -> list[int]:
    """The descriptors that can be read now, or within `seconds` (None: wait without a bound). Raises OSError
    for a closed descriptor."""
    if max(descriptors) < _SELECT_LIMIT:
        return select.select(descriptors, [], [], seconds)[0]
    return _polled(descriptors, select.POLLIN, seconds)


def wait_writable(descriptor: int) -> None:
    """Wait until it accepts data. Raises OSError for a closed descriptor."""
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
