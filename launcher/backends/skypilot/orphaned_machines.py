"""Finds machines at providers that belong to runs, by name and label, with or without a record.

Neighbours: `cloud_machine.py` labels what it launches, `cluster_teardown.py` ends a known run;
`teardown/rented_leftovers.py` offers the found machines to `launch gc`. A cluster is called `slip-<8
hex>-<the same 8 hex>` at its provider: the run's id, and the user id SkyPilot is given for it. Every user's
runs are named so; the label tells whose run it is. Knows nothing of records.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.backends.skypilot.provider_listings import place, wait_until_gone
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base import computer_identity
from launcher.base.errors import LaunchError, TeardownUnverified
from launcher.types.clouds import has_account, no_account

LABEL = "slipway-home"
# For listing, where the provider knows patterns; then for judging.
_PATTERN = "slip-????????-????????"
_OURS = re.compile(r"(slip-([0-9a-f]{8}))-\2")
# Importing SkyPilot takes 2 to 4 s, all regions' lists some 10 more, and ten times that on a busy computer.
LIST_SECONDS = 120.0
_END_SECONDS = 120.0
_USER_ID = "00000000"


def home_label(runs: Path) -> str:
    """The label that marks a run as this user's, on this computer, with this home. It tells others nothing,
    and stays the same after the records were deleted or the computer was renamed."""
    runs = runs.resolve()
    text = f"{os.getuid()}@{computer_identity.of_this_computer(runs.parent)}:{runs}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class OrphanedMachine:
    """A machine at a provider. `ours`: True if its label is this home's, False if it is another computer's or
    home's, None without labels. `began`: None if this provider does not tell."""

    id: str
    run_id: str
    where: str
    instance_type: str
    began: float | None
    ours: bool | None
    provider: dict[str, Any]


@dataclass(frozen=True)
class OrphanReport:
    """The search's result. `unasked`: clouds whose machines are not all known, with reasons; `unlisted`:
    those of them that list the machines of known runs alone, and so were asked nothing. `answered`: the
    places that gave their lists; `denied`: places where the account may not list machines, with reasons."""

    found: tuple[OrphanedMachine, ...]
    unasked: dict[str, str]
    answered: tuple[str, ...] = ()
    denied: dict[str, str] = field(default_factory=dict)
    unlisted: frozenset[str] = frozenset()


class _UnlistedError(LaunchError):
    """A cloud cannot be asked for machines without a run's own books."""


def find(
    clouds: Iterable[str], runs: Path, then: Callable[[str, SkyProcess], None] | None = None
) -> OrphanReport:
    """The machines with a run's name that these clouds list. `then` is called with each cloud that has
    given a list, and the process that asked it."""
    looks: list[OrphanReport] = []

    def ask(cloud: str) -> None:
        try:
            looks.append(_listed(cloud, runs, then))
        except LaunchError as error:
            why = f"{error.message}: {error.why}" if error.why else error.message
            unlisted = frozenset({cloud} if isinstance(error, _UnlistedError) else ())
            looks.append(OrphanReport((), {cloud: why}, unlisted=unlisted))

    asking = [threading.Thread(target=ask, args=(cloud,), daemon=True) for cloud in clouds]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    found = [machine for look in looks for machine in look.found]
    return OrphanReport(
        tuple(sorted(found, key=lambda machine: (machine.run_id, machine.id))),
        {cloud: why for look in looks for cloud, why in look.unasked.items()},
        tuple(sorted(place for look in looks for place in look.answered)),
        {place: why for look in looks for place, why in look.denied.items()},
        frozenset[str]().union(*(look.unlisted for look in looks)),
    )


def end(machine: OrphanedMachine) -> str:
    """Terminate it, and wait until its provider lists it no more. Raises LaunchError, TeardownUnverified."""
    with tempfile.TemporaryDirectory(prefix="slipway-forgotten-") as folder:
        sky = _sky(machine.provider["name"].lower(), Path(folder))
        try:
            sky.call("terminate", _END_SECONDS, provider=machine.provider)
            left = wait_until_gone(sky, machine.provider, _END_SECONDS)
        finally:
            sky.end()
    if left:
        raise TeardownUnverified(
            f"{machine.where} still lists {', '.join(left)}", "it was asked to end this machine", "launch gc"
        )
    return "ended: its provider no longer lists it"


def _listed(cloud: str, runs: Path, then: Callable[[str, SkyProcess], None] | None) -> OrphanReport:
    if not has_account(cloud, Path.home(), os.environ):
        raise no_account(cloud)
    with tempfile.TemporaryDirectory(prefix="slipway-forgotten-") as folder:
        sky = _sky(cloud, Path(folder))
        try:
            found = sky.call("machines_named", LIST_SECONDS, cloud=cloud, name=_PATTERN, label=LABEL)
            if then is not None and found is not None and found["answered"]:
                then(cloud, sky)
        finally:
            sky.end()
    if found is None:
        raise _UnlistedError("it lists only machines of known runs", "look in its console for slip-…", None)
    machines = [
        OrphanedMachine(
            id=one["id"],
            run_id=name[1],
            where=place(one["provider"]),
            instance_type=one["instance_type"],
            began=one["began"],
            ours=one["label"] == home_label(runs) if found["labels"] else None,
            provider=one["provider"],
        )
        for one in found["machines"]
        if (name := _OURS.fullmatch(one["provider"]["cluster_on_cloud"]))
    ]
    silent = found["silent"] or ({} if found["answered"] else found["denied"])
    unasked = {cloud: f"{', '.join(silent)}: {next(iter(silent.values()))}"} if silent else {}
    denied = {} if silent is found["denied"] else found["denied"]
    return OrphanReport(tuple(machines), unasked, tuple(found["answered"]), denied)


def _sky(cloud: str, folder: Path) -> SkyProcess:
    home = SkyHome(folder, [cloud], _USER_ID)
    home.make()
    return SkyProcess(home, folder / "skypilot.log")
