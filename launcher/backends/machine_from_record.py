"""Rebuilds the machine of a run from its record, in any process that has to end the run.

Neighbours: `teardown/guardian.py`, `teardown/take_down.py` and `ending.py` end machines by this,
`local_machine.py` and `cloud_machine.py` wrote the description. Knows nothing of how a machine came up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from launcher.base.errors import LaunchError, described
from launcher.types.machine import Proof

if TYPE_CHECKING:
    from launcher.records.records import RunRecord

_KINDS = {
    "local": ("launcher.backends.local_machine", "LocalMachine"),
    "cloud": ("launcher.backends.cloud_machine", "CloudMachine"),
}
# A starter for kinds of machines whose teardown needs more than imported modules: it prepares that
# beforehand.
_STANDBY = {"cloud": ("launcher.backends.skypilot.standby_home", "start_standby")}
# A call that was refused once, or met a busy computer, often succeeds the second time.
_ATTEMPTS = 2


class NoMachine:
    """The machine of a record whose run ended before it had one: nothing to end, nothing left."""

    def down(self) -> None:
        """Nothing was started."""

    def proof(self) -> Proof:
        """Nothing was started."""
        return Proof(True, "nothing was started")


class Terminable(Protocol):
    """The two calls of a machine that end it: all that a guardian needs."""

    def down(self) -> None: ...

    def proof(self) -> Proof: ...


class StandbyHelper(Protocol):
    """A standby process that can end a machine, even after an upgrade of this package."""

    def remove(self) -> None:
        """End it. Raises nothing."""
        ...


def from_record(record: RunRecord, standby: StandbyHelper | None = None) -> Terminable:
    """The machine that a record describes, in any process; `standby` is the result of `prepare_teardown`.

    Raises LaunchError for an unknown kind.
    """
    if not record.machine:
        return NoMachine()
    kind = _load(_import_path(record))
    return (
        kind.from_description(record.machine)
        if standby is None
        else kind.from_description(record.machine, standby)
    )


def prepare_teardown(record: RunRecord) -> StandbyHelper | None:
    """Import everything that ending this machine needs, and start its standby helper, which the caller must
    `remove`.

    An upgrade of this package may be half done when the machine must be ended, and a later import would load
    the new files. Raises LaunchError for an unknown kind, OSError.
    """
    if not record.machine:
        return None
    _load(_import_path(record))
    stand_by = _STANDBY.get(record.machine["kind"])
    return None if stand_by is None else _load(stand_by)(record.machine)


def end_machine(
    machine: Terminable, say: Callable[[str], None], also: Callable[[], object] = lambda: None
) -> Proof:
    """Take a machine down, then check that nothing is left. An error of one call does not stop the next one;
    after an error everything is tried once more. `also` ends processes that are not the machine's own. Raises
    no Exception: a failure is no proof.
    """
    proof = Proof(False, "not tried")
    for _ in range(_ATTEMPTS):
        troubles: list[str] = []
        _try(machine.down, "down", troubles)
        _try(also, "ending the program", troubles)
        proof = _proof(machine, troubles)
        for trouble in troubles:
            say(trouble)
        if proof.verified or not troubles:
            break
    return proof


def _load(place: tuple[str, str]) -> Any:
    """The attribute of a module, given as (module, name)."""
    module, name = place
    return getattr(importlib.import_module(module), name)


def _import_path(record: RunRecord) -> tuple[str, str]:
    kind = record.machine.get("kind")
    if kind not in _KINDS:
        raise LaunchError(
            f"{record.id} is on a machine of kind {kind!r}, which this version cannot end",
            "a newer version wrote the record",
            f"uv tool upgrade slipway-rl && launch down {record.id}",
        )
    return _KINDS[kind]


def _try(act: Callable[[], object], what: str, troubles: list[str]) -> None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - after any error the next call must still be made
        troubles.append(f"{what} failed: {described(error)}")


def _proof(machine: Terminable, troubles: list[str]) -> Proof:
    """The machine's own proof; if it cannot be asked, there is no proof."""
    try:
        return machine.proof()
    except Exception as error:  # noqa: BLE001 - as above
        troubles.append(f"looking for what is left failed: {described(error)}")
        return Proof(False, f"it is not proven that it is gone: {'; '.join(troubles)}")
