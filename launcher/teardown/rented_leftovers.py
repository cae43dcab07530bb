"""Finds unattended rented machines at their providers, for `launch gc`.

Neighbours: `backends/skypilot/orphaned_machines.py` finds them, `leftovers.py` finds those on this computer,
`records.py` has the records, which may have been deleted. Only ours: a machine is offered when its label or a
record of this home shows that a run of this home began it. A machine of another home or computer is named and
left alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launcher.backends.skypilot import orphaned_machines
from launcher.backends.skypilot.orphaned_machines import OrphanedMachine, OrphanReport
from launcher.base import atomic
from launcher.base.home import Home
from launcher.base.units import format_duration
from launcher.records.records import RecordStore
from launcher.teardown.leftovers import Leftover
from launcher.types.clouds import SELF_HOSTED, clouds_of

# Beside the runs: the clouds they were on, for when their records are gone.
_CLOUDS = "clouds.json"


def remember_clouds(home: Home, infra: Iterable[str]) -> None:
    """Record the clouds before a provider is asked for a machine, so that `launch gc` asks them from now
    on."""
    known = _remembered(home)
    clouds = sorted({*known, *clouds_of(list(infra))})
    if clouds == known:
        return
    atomic.write(home.data / _CLOUDS, json.dumps(clouds))


def clouds(home: Home) -> list[str]:
    """The clouds that runs of this home were on. The user's own clusters are not asked: they cost nothing,
    and they list their jobs themselves."""
    used = set(_remembered(home))
    for record in RecordStore(home).list():
        if record.machine.get("kind") == "cloud":
            used |= set(clouds_of(record.machine["infra"]))
    return sorted(used - SELF_HOSTED)


def find_rented_leftovers(
    home: Home, infra: Iterable[str], note: Callable[[str], None]
) -> tuple[list[Leftover], OrphanReport]:
    """The machines at providers of this home's runs that are over or unknown; and the places that
    answered."""
    # Providers before records: the run of a machine that is listed has its record by now.
    seen = orphaned_machines.find(clouds_of(list(infra)), home.runs)
    if seen.answered:
        note(f"asked {', '.join(seen.answered)}")
    for cloud, why in sorted(seen.unasked.items()):
        note(f"{cloud} was not asked for machines of earlier runs: {why}")
    for place, why in sorted(seen.denied.items()):
        note(f"{place} did not answer: the account may not list machines there ({why})")
    return list(_leftovers(RecordStore(home), seen.found, note)), seen


def _leftovers(
    store: RecordStore, found: Iterable[OrphanedMachine], note: Callable[[str], None]
) -> Iterator[Leftover]:
    records = {record.id: record for record in store.list()}
    unreadable = {record.id for record in store.unreadable()}
    for machine in found:
        record = records.get(machine.run_id)
        what = f"{machine.instance_type} {machine.id} of {machine.run_id} at {machine.where}"
        age = "" if machine.began is None else f" began {format_duration(time.time() - machine.began)} ago"
        if machine.run_id in unreadable or (record is not None and record.live):
            continue  # looked after, or a find of its own
        if record is None and not machine.ours:
            whose = "a run of another computer, user or LAUNCH_HOME; left alone"
            if machine.ours is None:
                whose = f"no label says whose it is, and no record of {machine.run_id} is here; left alone: "
                whose += f"end it in the console of {machine.where} if it is yours"
            note(f"{what}{age}: {whose}")
            continue
        why = "the run is over" if record else f"there is no record of the run in {store.runs}"

        def remove(machine: OrphanedMachine = machine) -> str:
            if any(known.live for known in store.list() if known.id == machine.run_id):
                return "its run is still alive"
            return orphaned_machines.end(machine)

        why += f"; it{age and f'{age} and'} costs money; its data cannot be copied"
        yield Leftover("machine", what, why, remove, machine.run_id)


def _remembered(home: Home) -> list[str]:
    try:
        found = json.loads(Path(home.data / _CLOUDS).read_text())
    except (OSError, ValueError):
        return []
    return [str(cloud) for cloud in found] if isinstance(found, list) else []
