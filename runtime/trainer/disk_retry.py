"""Retries a write while the disk is full, within a bound.

Neighbours: the recipe commits each step with it. Knows nothing of the content.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from safetensors import SafetensorError

T = TypeVar("T")

_RETRY_SECONDS = 300.0
_POLL_SECONDS = 1.0


def retry_while_disk_full(
    write: Callable[[], T], stopping: Callable[[], bool], on_failure: Callable[[Exception], None]
) -> T:
    """The result of `write`, once it succeeds. `on_failure` is called after each failed try."""
    until = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return write()
        except (OSError, SafetensorError) as error:  # safetensors words the disk's errors itself
            if isinstance(error, FileExistsError) or stopping() or time.monotonic() > until:
                raise
            on_failure(error)
        time.sleep(_POLL_SECONDS)
