"""Tells whether a run's results were abandoned with `launch down --give-up-results`.

Neighbours: `ending.py` and `teardown/take_down.py` ask while they bring results home; `teardown_verbs.py`
writes it into the record. Knows nothing of machines or of the results' way home.
"""

from __future__ import annotations

import contextlib
import time

from launcher.records.records import RecordStore
from launcher.types.machine import Stopped

# A look reads a small file.
_POLL_SECONDS = 0.5


def was_requested(store: RecordStore, run_id: str) -> Stopped:
    """A function that reads from the record whether they were abandoned; the request cannot be taken back.
    May be called often."""
    requested, looked_at = False, float("-inf")

    def given_up() -> bool:
        nonlocal requested, looked_at
        if not requested and time.monotonic() - looked_at >= _POLL_SECONDS:
            looked_at = time.monotonic()
            with contextlib.suppress(Exception):  # a record that cannot be read abandons nothing
                requested = store.load(run_id).given_up
        return requested

    return given_up


def after_grace(seconds: float, given_up: Stopped) -> Stopped:
    """The same, but only after `seconds`: most copies are complete by then."""
    bound = time.monotonic() + seconds
    return lambda: time.monotonic() >= bound and given_up()
