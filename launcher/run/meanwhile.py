"""What a run needs once its runtime is ready, imported while it waits for that: half a second of one core.

Neighbours: `run.py` begins it where it begins to serve, and imports the same names where it uses them.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

# httpx itself imports httpcore with its first client.
NEEDED_NEXT = (
    "launcher.door.relay",
    "launcher.page.run_page",
    "launcher.results.background_copy",
    "launcher.run.pulse",
    "launcher.run.work",
    "httpcore",
)


def import_meanwhile() -> threading.Thread:
    """Begin, and hold nobody up: whoever imports one of them before it is there waits for it."""
    thread = threading.Thread(target=_import_all, name="imports", daemon=True)
    thread.start()
    return thread


def _import_all() -> None:
    for name in NEEDED_NEXT:
        with contextlib.suppress(Exception):  # who needs it meets the same error, and says so
            importlib.import_module(name)
