"""Lines for the user of ART's backend: plain text on stderr, each line once in a process.

Neighbours: everything in this folder. Knows nothing of runs.
"""

from __future__ import annotations

import sys
import threading

from launcher.base.sanitize import plain_text as sanitized

_lock = threading.Lock()
_logged: set[str] = set()


def log_once(text: str) -> None:
    """Log the line, unless it was logged before."""
    with _lock:
        if text in _logged:
            return
        _logged.add(text)
    sys.stderr.write(f"art: {sanitized(text)}\n")
    sys.stderr.flush()
