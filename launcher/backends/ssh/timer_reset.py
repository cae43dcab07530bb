"""Resets a rented machine's own timer again and again while its results are downloaded.

The runtime's keeper does that while the run may go on. At the end the runtime may be dead, or its lease or
its launch over; then a copy that takes longer than the idle minutes would be cut. The timer is reset only
while a copy makes progress: `rsync.py` ends one that stands still. Neighbours: `remote_results.py` pulls
under this, `remote_folder.py` asks the machine. Knows nothing of the files.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from launcher.base.log import LOGGER

# As the runtime's keeper: the least that can be armed is a minute, and three of four may fail.
EVERY_SECONDS = 15.0
# A reset in progress at the end is waited for so long: an ssh that hangs must not delay the end.
_END_SECONDS = 2.0


@contextlib.contextmanager
def resetting_timer(set_back: Callable[[], object], within_limits: Callable[[], bool]) -> Iterator[None]:
    """Call `set_back` at once and at intervals, in a thread, until the block is over or the machine may no
    longer stay. An error in it does not fail the copy."""
    over = threading.Event()

    def stay() -> None:
        while within_limits():
            try:
                set_back()
            except Exception as error:  # noqa: BLE001 - the copy shows by itself whether the machine is there
                LOGGER.debug("the machine's idle timer was not reset: %r", error)
            if over.wait(EVERY_SECONDS):
                return

    thread = threading.Thread(target=stay, name="timer-setback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_SECONDS)
