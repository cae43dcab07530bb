"""Tells whether a run's processes can be seen from here; those of another computer or container cannot.

An unknown run is left as it is: it is neither ended nor resumed, unless `launch down` names it. Neighbours:
`process_location.py` compares places, `heartbeat.py` has the sign of life, `records.py` asks. Knows nothing
of how a run is ended.
"""

from __future__ import annotations

from pathlib import Path

from launcher.base import clock
from launcher.base.process_location import ProcessLocation
from launcher.base.units import format_duration
from launcher.records import heartbeat, teardown_lock


def is_elsewhere(place: ProcessLocation | None, folder: Path) -> bool:
    """Whether processes of `place` may live though they are not seen here.

    A place of None, from older versions, is this computer. Processes of an earlier boot of this computer are
    dead. The exception is a sign of the launch's life newer than this boot: then another computer has the
    same name and machine-id.
    """
    if place is None:
        return False
    seen = place.visibility_from(ProcessLocation.here())
    if seen != "rebooted":
        return seen == "elsewhere"
    age = heartbeat.age_seconds(folder)
    return age is not None and age < clock.boot_seconds()


def is_stale(folder: Path) -> bool:
    """Whether its sign of life is so old that no process attends the run, here or elsewhere."""
    age = heartbeat.age_seconds(folder)
    if age is None or age <= heartbeat.STALE_SECONDS:
        return False
    at_it = teardown_lock.owner(folder)
    return at_it is None or at_it.host is None or at_it.is_stuck(folder)


def describe(place: ProcessLocation, folder: Path) -> str:
    """ "another computer or container (gpubox), heard of 4s ago"."""
    age = heartbeat.age_seconds(folder)
    where = place.describe(ProcessLocation.here())
    if age is None:
        return f"{where}, with no sign of life that can be read"
    heard = f"{format_duration(age)} ago" if age >= 1 else "just now"
    return f"{where}, {'silent: last ' if is_stale(folder) else ''}heard of {heard}"
