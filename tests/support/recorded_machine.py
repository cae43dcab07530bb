"""A rented machine as a folder, found again by a run's record: what another process than `launch` ends.

`FOLDER/calls` has a line for each call. While `FOLDER/pull-fails` exists no copy succeeds, while `pull-hangs`
does none ends by itself, while `gone` does its provider lists it no more, while `unproven` does nothing says
that it is down. Its disk goes with it. `register`
makes its kind one of a record's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from launcher.backends import machine_from_record
from launcher.base.errors import JobFailed, NotPulled
from launcher.types.machine import Progress, Proof, PullReport, Stopped, never_stopped, no_progress

KIND = "folder"


def register() -> None:
    """From now on, in this process."""
    machine_from_record._KINDS[KIND] = (__name__, RecordedMachine.__name__)


def describe(folder: Path, price: float) -> dict[str, Any]:
    """What stands in the record."""
    folder.mkdir(parents=True, exist_ok=True)
    standing = {"price_per_hour": price, "where": "a folder", "instance_type": "none"}
    return {"kind": KIND, "folder": str(folder), "standing": standing}


def calls(folder: Path) -> list[str]:
    """What was asked of it so far."""
    path = folder / "calls"
    return path.read_text().split() if path.exists() else []


class RecordedMachine:
    """The part of a machine that is there after its launch."""

    ephemeral = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Self:
        return cls(Path(description["folder"]))

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        self._called("pull")
        progress("1 MB of 2 MB")
        while self._is("pull-hangs"):
            if stopped():
                raise NotPulled("the results are still on the machine", "it was broken off", None)
            time.sleep(0.05)
        if self._is("pull-fails"):
            raise NotPulled("the results are still on the machine", "rsync ended with code 13", None)
        into.mkdir(parents=True, exist_ok=True)
        (into / "came-home").touch()
        lost = "the machine is gone, with everything after step 3" if self._is("gone") else None
        return PullReport(into, files=1, bytes=0, seconds=0.0, step=3, lost=lost)

    def close_wandb(self, seconds: float = 0.0) -> None:
        self._called("close_wandb")

    def committed(self) -> int | None:
        return None

    def ended(self) -> str | None:
        if self._is("gone"):
            raise JobFailed("the machine is gone", "its provider no longer lists it", None)
        return None

    def down(self) -> None:
        self._called("down")

    def proof(self) -> Proof:
        if self._is("unproven"):
            return Proof(False, "the login has expired")
        return Proof(True, "its folder says so")

    def _is(self, what: str) -> bool:
        return (self._folder / what).exists()

    def _called(self, name: str) -> None:
        with (self._folder / "calls").open("a") as file:
            file.write(f"{name}\n")
