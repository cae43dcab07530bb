"""What Arbor's names say to the user: one plain line on stderr, each line once in a process.

Neighbours: everything in this folder. Knows nothing of runs.
"""

from __future__ import annotations

import sys
import threading

from launcher.base.sanitize import plain_text as sanitized

_lock = threading.Lock()
_said: set[str] = set()


def say(text: str) -> None:
    """The line, now."""
    sys.stderr.write(f"arbor: {sanitized(text)}\n")
    sys.stderr.flush()


def say_once(text: str) -> None:
    """The line, unless it has been said."""
    with _lock:
        if text in _said:
            return
        _said.add(text)
    say(text)
