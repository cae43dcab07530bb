"""The machine of a run's record, found again in whatever process asks: all that ends a run needs.

Neighbours: `safety/guardian.py` and `safety/reap.py` ask, `local.py` and `cloud.py` wrote the description.
Knows nothing of how a machine came up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from launcher.errors import LaunchError
from launcher.machines.base import Proof

if TYPE_CHECKING:
    from launcher.safety.records import RunRecord


class NoMachine:
    """The machine of a record whose run ended before it had one: nothing to end, nothing left."""

    def down(self) -> None:
        """Nothing was started."""

    def proof(self) -> Proof:
        """Nothing was started."""
        return Proof(True, "nothing had been started")


class Endable(Protocol):
    """The part of a machine that ends it: all that a guardian needs."""

    def down(self) -> None: ...

    def proof(self) -> Proof: ...


def from_record(record: RunRecord) -> Endable:
    """The machine a record describes, in whatever process asks. Raises LaunchError for an unknown kind."""
    if not record.machine:
        return NoMachine()
    kind = record.machine.get("kind")
    if kind == "local":
        from launcher.machines.local import LocalMachine

        return LocalMachine.described(record.machine)
    if kind == "cloud":
        from launcher.machines.cloud import CloudMachine

        return CloudMachine.described(record.machine)
    raise LaunchError(
        f"{record.id} is on a machine of kind {kind!r}, which this version cannot end",
        "a newer version wrote the record",
        f"uv tool upgrade slipway-rl && launch down {record.id}",
    )
