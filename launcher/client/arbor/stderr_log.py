"""Lines for the user of Arbor's names: plain text on stderr, each line once in a process.

Neighbours: everything in this folder. Knows nothing of runs.
"""

from __future__ import annotations

import sys
import threading

from launcher.base.sanitize import plain_text as sanitized

_lock = threading.Lock()
_logged: set[str] = set()


def log(text: str) -> None:
    """The line, now."""
    sys.stderr.write(f"arbor: {sanitized(text)}\n")
    sys.stderr.flush()


def log_once(text: str) -> None:
    """Log the line, unless it was logged before."""
    with _lock:
        if text in _logged:
            return
        _logged.add(text)
    log(text)
