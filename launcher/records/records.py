"""Run records: one file for each run, written and fsynced *before* the run starts anything.

Neighbours: `run.py` creates and updates, `guardian.py` and `launch status/down/gc` read and finish.
A record is `runs/<id>/record.json`: replaced whole under a lock, never half. Holds no secret.
Knows nothing of how a machine is made or ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from launcher.base import atomic, clock, locks
from launcher.base.errors import LaunchError, UsageError
from launcher.base.home import Home
from launcher.base.process_location import ProcessLocation
from launcher.base.processes import ProcessId
from launcher.base.suggestions import closest_match
from launcher.records import reachability, teardown_lock
from launcher.records.lives import Life
from launcher.types.machine import Proof

SCHEMA = 1
RECORD = "record.json"
# In the environment of every process a run starts, so that none is out of reach.
RUN_VARIABLE = "SLIPWAY_RUN_ID"
ID_PATTERN = re.compile(r"slip-[0-9a-f]{8}")
NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")

# The life of a run; the last two are ends.
STATES = (
    "created", "arm", "push", "setup", "serve", "connect", "work", "pull", "down", "unverified", "verified",
)  # fmt: skip
ENDS = ("unverified", "verified")
_PROCESSES = ("launch", "guardian", "minder")


@dataclass(frozen=True)
class RunRecord:
    """The record of a run. `state` is the phase that was entered last, or how it ended. `unverified`:
    ended, but without a proof that nothing is left; such a run still counts as live. `exit_code` is the
    user's command's own; `ended_by` is "launch", "guardian", "down", "gc" or "resume"; `reason` is the
    cause of the end, `why` the cause of that. `details` is the caller's own (JSON). `begun`: when this
    life began, None for the first; `begun_boot`: the boot clock then. `earlier_lives` are those before.
    `unpulled`: why its newest results are not on this computer; `given_up`: the user no longer waits for
    them. `troubles`: other failures during its end. `place`: where this life's processes are, None in records
    of older versions. `folder`: the run's, as this process finds it; not in the file."""

    id: str
    created: float
    state: str = "created"
    name: str | None = None
    command: tuple[str, ...] = ()
    machine: dict[str, Any] = field(default_factory=dict)
    launch: ProcessId | None = None
    guardian: ProcessId | None = None
    minder: ProcessId | None = None
    url: str | None = None
    exit_code: int | None = None
    ended: float | None = None
    ended_by: str | None = None
    reason: str | None = None
    why: str | None = None
    proof: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    begun: float | None = None
    begun_boot: float | None = None
    earlier_lives: tuple[Life, ...] = ()
    unpulled: str | None = None
    given_up: bool = False
    troubles: tuple[str, ...] = ()
    place: ProcessLocation | None = None
    schema: int = SCHEMA
    folder: Path = field(default=Path(), compare=False)

    @property
    def live(self) -> bool:
        """Whether something of it may still run; only a proof makes it False."""
        return self.state != "verified"

    @property
    def is_attended(self) -> bool:
        """Whether a launcher or an active guardian attends it, or may do so out of sight."""
        if self.elsewhere or self.launch_alive:
            return True
        rests = self.state == "unverified" and teardown_lock.owner(self.folder) is None
        return self.guardian is not None and not rests and self.guardian.alive()

    @property
    def launch_alive(self) -> bool:
        """Whether its launcher is alive here, to be asked and signalled."""
        return self.launch is not None and not self.elsewhere and self.launch.alive()

    @property
    def elsewhere(self) -> bool:
        """Whether it is live and its processes are another computer's or container's: unknown, not dead."""
        return self.live and reachability.is_elsewhere(self.place, self.folder)

    @property
    def silent(self) -> bool:
        """Whether it has given no sign of life for so long that it seems unattended."""
        return reachability.is_stale(self.folder)

    @property
    def rented(self) -> bool:
        """Whether its machine is rented: any computer can ask its provider."""
        return self.machine.get("kind", "local") != "local"

    @property
    def location(self) -> str:
        """The location of a run that is `elsewhere`, and the age of its last sign of life, in words."""
        return "here" if self.place is None else reachability.describe(self.place, self.folder)

    @property
    def may_have_results(self) -> bool:
        """Whether it was ever ready in this life, and so may have results that exist nowhere else."""
        return bool(self.machine) and self.url is not None

    @property
    def logs_to_wandb(self) -> bool:
        """Whether its trainer has a Weights & Biases run."""
        return self.details.get("settings", {}).get("wandb", "disabled") != "disabled"

    @property
    def logs_to_trackio(self) -> bool:
        """Whether its steps go to Trackio on this computer."""
        return bool(self.details.get("settings", {}).get("trackio"))

    @property
    def life(self) -> Life:
        """The newest life, up to its proven end: an unproven machine is still paid for."""
        price = (self.machine.get("standing") or {}).get("price_per_hour") or 0.0
        begun = self.created if self.begun is None else self.begun
        ended = begun if self.ended is None else self.ended
        return Life(begun, None if self.live else ended, price)

    def now(self) -> float:
        """The time by the wall clock of its newest life's begin, whatever has been set since (P13)."""
        return clock.wall_time(self.life.begun, self.begun_boot, self.place.boot if self.place else None)

    @property
    def lives(self) -> tuple[Life, ...]:
        """All its lives, the first one first. A run costs nothing between two of them."""
        return (*self.earlier_lives, self.life)

    def to_json(self) -> str:
        """The record as its file holds it."""
        values = dataclasses.asdict(self)
        del values["folder"]
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, folder: Path = Path()) -> Self:
        """Raises ValueError when the text is no record of a schema known here."""
        try:
            values = json.loads(text)
            if values["schema"] > SCHEMA:
                raise ValueError(f"written by a newer version (schema {values['schema']})")
            known: dict[str, Any] = {key: values[key] for key in cls.__dataclass_fields__ if key in values}
            for key in _PROCESSES:
                known[key] = ProcessId(**known[key]) if known.get(key) else None
            known["place"] = ProcessLocation.from_dict(values["place"]) if values.get("place") else None
            known["command"] = tuple(values["command"])
            known["earlier_lives"] = tuple(map(Life.from_dict, values.get("earlier_lives", ())))
            known["troubles"] = tuple(values.get("troubles", ()))
            return cls(**known, folder=folder)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a run's record: {error!r}") from error


@dataclass(frozen=True)
class UnreadableRecord:
    """A run's folder whose record cannot be read. It is shown, never skipped in silence."""

    id: str
    path: Path
    why: str


class LiveNameError(UsageError):
    """A run with this name is live: attach to `record`, or take another name."""

    def __init__(self, record: RunRecord) -> None:
        state = record.state if record.is_attended else f"{record.state}, left alone"
        lives = f"; it lives on {record.location}" if record.elsewhere else ""
        super().__init__(
            f"a run named {record.name} is live ({record.id})",
            f"its state: {state}{lives}",
            f"launch status {record.name}  # to end it: launch down {record.name}; or take another --name",
        )
        self.record = record


class LiveRunError(UsageError):
    """A run to be resumed has not ended."""

    def __init__(self, record: RunRecord) -> None:
        label = record.name or record.id
        lives = f"; it lives on {record.location}" if record.elsewhere else ""
        super().__init__(
            f"{label} is live: there is nothing to resume",
            f"its state: {record.state}{lives}",
            f"launch status {label}  # to end it: launch down {label}",
        )
        self.record = record


class RecordStore:
    """The records of one home. Every write survives a crash of the program and of the computer."""

    def __init__(self, home: Home) -> None:
        self.runs = home.runs

    @classmethod
    def of_record(cls, record: Path) -> Self:
        """The store of a record's file: runs/<id>/record.json."""
        store = cls.__new__(cls)
        store.runs = record.parent.parent
        return store

    def folder(self, run_id: str) -> Path:
        """The run's folder."""
        return self.runs / run_id

    def path(self, run_id: str) -> Path:
        """The run's record's file."""
        return self.runs / run_id / RECORD

    def create(self, *, name: str | None = None, command: tuple[str, ...] = (), **fields: Any) -> RunRecord:
        """Mint an id and write the record; on disk when this returns.

        Raises LiveNameError when a run with the name is live, UsageError for a name that cannot be one.
        """
        atomic.make_folder(self.runs)
        with _folder_lock(self.runs / ".lock"):
            self.check_name(name)
            run_id = self._mint()
            teardown_lock.create(self.folder(run_id))
            ours: dict[str, Any] = {"launch": ProcessId.own(), "place": ProcessLocation.here()}
            ours |= {"name": name, "command": command, "folder": self.folder(run_id)}
            ours["begun_boot"] = clock.boot_seconds()
            record = RunRecord(run_id, time.time(), **(ours | fields))
            self._write(record)
            atomic.sync(self.runs)
        return record

    def reopen(self, run_id: str, **fields: Any) -> RunRecord:
        """Begin another life of a run that is over: the same id and folder, this process its launcher.

        Raises LiveRunError when it is not over, LiveNameError when another live run has its name by now.
        """
        with _folder_lock(self.runs / ".lock"):
            record = self._read(run_id)
            if record.live:
                raise LiveRunError(record)
            self.check_name(record.name)
            teardown_lock.create(self.folder(run_id))
            ended = {"guardian": None, "minder": None, "url": None, "exit_code": None, "ended": None}
            ended |= {"ended_by": None, "reason": None, "why": None, "proof": None, "unpulled": None}
            life = {"troubles": (), "given_up": False, "begun": time.time(), "earlier_lives": record.lives}
            life |= {"launch": ProcessId.own(), "place": ProcessLocation.here()}
            life["begun_boot"] = clock.boot_seconds()
            return self.update(run_id, state="created", **(ended | life | fields))

    def check_name(self, name: str | None) -> None:
        """Raise the error that `create` would raise for this name, without making anything."""
        if name is None:
            return
        if not NAME_PATTERN.fullmatch(name) or ID_PATTERN.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a valid run name",
                "a name has 1 to 40 of a-z, 0-9 and -, no - at either end, and must not look like a run id",
                "launch --name my-run",
            )
        for record in self.list():
            if record.name == name and record.live:
                raise LiveNameError(record)

    def update(self, run_id: str, **changes: Any) -> RunRecord:
        """Change fields of the newest record on disk, any process's; durable when this returns."""
        with _folder_lock(self.folder(run_id) / ".lock"):
            record = dataclasses.replace(self._read(run_id), **changes)
            self._write(record)
        return record

    def load(self, id_or_name: str) -> RunRecord:
        """The run with this id; or with this name: the live one, else the newest. Raises UsageError."""
        if ID_PATTERN.fullmatch(id_or_name) and self.path(id_or_name).exists():
            try:
                return self._read(id_or_name)
            except ValueError as error:
                raise LaunchError(
                    f"the record of {id_or_name} cannot be read", str(error), f"less {self.path(id_or_name)}"
                ) from error
        records = self.list()
        named = [record for record in records if record.name == id_or_name]
        if named:
            return max(named, key=lambda record: (record.live, record.created))
        close = closest_match(id_or_name, [record.name or record.id for record in records])
        raise UsageError(
            f"there is no run {id_or_name!r}",
            f"did you mean {close}?" if close else f"{len(records)} runs are recorded under {self.runs}",
            f"launch status {close}" if close else "launch status",
        )

    def list(self) -> Sequence[RunRecord]:
        """All readable records, oldest first."""
        found = [record for record in self._all() if isinstance(record, RunRecord)]
        return sorted(found, key=lambda record: (record.created, record.id))

    def unreadable(self) -> Sequence[UnreadableRecord]:
        """The records that cannot be read, each with why."""
        return [record for record in self._all() if isinstance(record, UnreadableRecord)]

    def _all(self) -> Iterator[RunRecord | UnreadableRecord]:
        try:
            entries = sorted(os.listdir(self.runs))
        except FileNotFoundError:
            return
        for entry in entries:
            if not ID_PATTERN.fullmatch(entry):
                continue
            try:
                yield self._read(entry)
            except FileNotFoundError:
                # A crash between the folder and its record: nothing had been started.
                continue
            except (OSError, ValueError) as error:
                yield UnreadableRecord(entry, self.path(entry), str(error))

    def _read(self, run_id: str) -> RunRecord:
        return RunRecord.from_json(self.path(run_id).read_text(), self.folder(run_id))

    def _write(self, record: RunRecord) -> None:
        atomic.write(self.path(record.id), record.to_json(), durable=True, private=True, locked=True)

    def _mint(self) -> str:
        """A new id with its folder (0700). The id is unique: making the folder decides."""
        while True:
            run_id = f"slip-{secrets.token_hex(4)}"
            with contextlib.suppress(FileExistsError):
                self.folder(run_id).mkdir(mode=0o700)
                return run_id


def end_fields(proof: Proof, ended_by: str, ended: float, unpulled: str | None) -> dict[str, Any]:
    """The fields that say how a run ended, for `update`: the same whoever ended it. `ended`: by the record's
    clock (`RunRecord.now`)."""
    state = "verified" if proof.verified else "unverified"
    fields = {"state": state, "proof": proof.to_dict(), "ended": ended, "ended_by": ended_by}
    return fields | {"unpulled": unpulled}


@contextlib.contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system frees it when the holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.acquire(descriptor, path)
        yield
    finally:
        os.close(descriptor)
