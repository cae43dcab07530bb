"""Rented machines that nobody looks after, asked for at their providers: for `launch gc`.

Neighbours: `machines/skypilot/forgotten_machines.py` finds them, `leftovers.py` has what is left on this
computer, `records.py` the ledger, which may have been deleted. Only ours: a machine is offered when its
label or this ledger says that a run of this home began it; what is another home's or another computer's is
named and left alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launcher.base.home import Home
from launcher.base.units import format_duration
from launcher.ledger.records import RecordStore
from launcher.machines.skypilot import forgotten_machines
from launcher.machines.skypilot.forgotten_machines import Stray
from launcher.safety.leftovers import Find
from launcher.values.clouds import OWN, clouds_of

# Beside the runs: the clouds they were on, for when their records are gone.
_CLOUDS = "clouds.json"


def remember(home: Home, infra: Iterable[str]) -> None:
    """On disk before a provider is asked for a machine: from now on `launch gc` asks there."""
    known = _remembered(home)
    clouds = sorted({*known, *clouds_of(list(infra))})
    if clouds == known:
        return
    path = home.data / _CLOUDS
    aside = path.with_name(f".{_CLOUDS}.{os.getpid()}")
    aside.write_text(json.dumps(clouds))
    aside.replace(path)


def clouds(home: Home) -> list[str]:
    """The clouds that runs of this home were on. Clusters of one's own are not asked: nobody bills for
    them, and they list their jobs themselves."""
    used = set(_remembered(home))
    for record in RecordStore(home).list():
        if record.machine.get("kind") == "cloud":
            used |= set(clouds_of(record.machine["infra"]))
    return sorted(used - OWN)


def look(home: Home, infra: Iterable[str], note: Callable[[str], None]) -> tuple[list[Find], list[str]]:
    """What the providers list of runs of this home that are over or unknown; and the clouds that could not
    be asked."""
    # Providers before records: the run of a machine that is listed has its record by now.
    seen = forgotten_machines.find(clouds_of(list(infra)), home.runs)
    for cloud, why in seen.unasked.items():
        note(f"{cloud} was not asked for machines of earlier runs: {why}")
    return list(_finds(RecordStore(home), seen.found, note)), sorted(seen.unasked)


def _finds(store: RecordStore, found: Iterable[Stray], note: Callable[[str], None]) -> Iterator[Find]:
    records = {record.id: record for record in store.list()}
    unreadable = {record.id for record in store.unreadable()}
    for stray in found:
        record = records.get(stray.run_id)
        what = f"{stray.instance_type} {stray.id} of {stray.run_id} at {stray.where}"
        age = format_duration(time.time() - stray.began)
        if stray.run_id in unreadable or (record is not None and record.live):
            continue  # looked after, or a find of its own
        if record is None and not stray.ours:
            note(f"{what} began {age} ago: a run of another computer, user or home; left alone")
            continue
        why = "the run is over" if record else f"no record of the run is left in {store.runs}"

        def remove(stray: Stray = stray) -> str:
            if any(known.live for known in store.list() if known.id == stray.run_id):
                return "its run lives after all"
            return forgotten_machines.end(stray)

        why += f"; it began {age} ago and is paid for; what is on it cannot be brought home"
        yield Find("machine", what, why, remove, stray.run_id)


def _remembered(home: Home) -> list[str]:
    try:
        found = json.loads(Path(home.data / _CLOUDS).read_text())
    except (OSError, ValueError):
        return []
    return [str(cloud) for cloud in found] if isinstance(found, list) else []
