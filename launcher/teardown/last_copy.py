"""The last copy of a run whose launch is gone: decides how long its machine is kept for its results.

It goes on while bytes come home; for the run's lease at most, and never past deadline or budget. Neighbours:
`guardian.py` copies under this and then ends the machine, `take_down.py` knows the limits. Knows nothing of
the transfer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launcher.base import clock
from launcher.base.units import format_duration
from launcher.records.records import RunRecord
from launcher.teardown import take_down
from launcher.types.machine import Stopped

# Without a byte for so long nothing is coming (G29).
STALL_SECONDS = 20.0
# For plans of older versions.
_LEASE_SECONDS = 900.0
_POLL_SECONDS = 0.5
# A copy that is interrupted leaves its downloaded part in its place.
_END_SECONDS = 5.0


class SharedLease:
    """The time that all last copies of one guardian have together: the run's lease, from the first one on.

    `unpulled`: why the last of them did not bring all."""

    def __init__(self) -> None:
        self.unpulled: str | None = None
        self._until: float | None = None

    def until(self, record: RunRecord) -> float:
        """The end by `clock.boot_seconds`; from now on if this is the first one."""
        if self._until is None:
            self._until = clock.boot_seconds() + _lease(record)
        return self._until

    def begun(self) -> bool:
        """Whether there was a first copy."""
        return self._until is not None

    def is_running(self) -> bool:
        """Whether there was a first copy, and its time has not passed."""
        return self._until is not None and clock.boot_seconds() < self._until


def copy_results(
    record: RunRecord,
    folder: Path,
    copy: Callable[[Stopped], str | None],
    given_up: Stopped,
    together: SharedLease | None = None,
) -> str | None:
    """Copy into `folder`; returns the reason if not all arrived, else None. `copy` returns such a reason
    or raises; it runs in a thread of its own, and is abandoned when its time is over. `together`: the time
    shared with earlier copies."""
    over, outcome, failure = threading.Event(), list[str | None](), list[Exception]()

    def act() -> None:
        try:
            outcome.append(copy(over.is_set))
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            failure.append(error)

    thread = threading.Thread(target=act, name="last-copy", daemon=True)
    thread.start()
    try:
        until = (together or SharedLease()).until(record)
        why = _while_it_moves(thread, record, folder, given_up, until)
    finally:
        over.set()
    if why is not None:
        thread.join(_END_SECONDS)
    if failure and why is None:
        raise failure[0]
    return outcome[0] if outcome and (outcome[0] is None or why is None) else why


def _lease(record: RunRecord) -> float:
    return (record.details.get("plan") or {}).get("lease_seconds") or _LEASE_SECONDS


def _while_it_moves(
    thread: threading.Thread, record: RunRecord, folder: Path, given_up: Stopped, until: float
) -> str | None:
    """Wait for the copy's end. Returns the reason if the wait was given up."""
    came, moved_at = _bytes(folder), time.monotonic()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if (now := _bytes(folder)) != came:
            came, moved_at = now, time.monotonic()
        if not thread.is_alive():
            break
        if given_up():
            return "the user gave them up"
        if reached := take_down.limit_reached(record, record.now()):
            return reached
        if clock.boot_seconds() >= until:
            return f"they did not arrive within the lease of {format_duration(_lease(record))}"
        if time.monotonic() - moved_at >= STALL_SECONDS:
            return f"no bytes arrived for {STALL_SECONDS:.0f} s"
    return None


def _bytes(folder: Path) -> int:
    """How much is in a folder, of files that are half here as well."""
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that go meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # renamed into its place meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total
