"""A job of an Arbor client, and what of it is on disk: its settings, its rounds, the groups not yet trained.

    arbor/brave-otter-3f2a9c11/job.json                 settings, how each round ended, checkpoints
    arbor/brave-otter-3f2a9c11/rounds/000007.jsonl      a line for each batch id taken in for that round

A round is what a client sends between two of its questions: the groups of one optimizer step. A batch is
taken in once its line is on disk; once its round has ended the line keeps its id and its digest alone.
Neighbours: jobs.py answers clients with it, training.py trains rounds. Knows nothing of HTTP or of the queue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from runtime.gateway.arbor import job_names
from runtime.gateway.arbor.bodies import Posted, digest_of
from runtime.shared import failpoints, files
from runtime.shared.schema import Member, StepSettings
from runtime.shared.statuses import StepCounts

log = logging.getLogger(__name__)

_JOB = "job.json"
_ROUNDS = "rounds"

State = Literal["running", "succeeded", "cancelled", "failed"]


class Kept(BaseModel):
    """What is on disk: a key that a later gateway wrote is left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Outcome(Kept):
    """How a round ended; `version`: what the policy was then. `copies`: groups that came more than once."""

    kind: Literal["trained", "nothing", "failed"]
    version: int
    step: int | None = None
    error: str | None = None
    groups: int = 0
    copies: int = 0
    counts: StepCounts = StepCounts()


class Batch(Kept):
    """What one batch id brought to a round; `groups` is empty once the round has ended."""

    batch: int
    digest: str
    contents: list[str] = []
    groups: list[list[Member]] = []
    metrics: dict[str, float] = {}


class JobFile(BaseModel):
    """`job.json`, and the job's facts while it lives."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    id: str
    model: str
    created: float
    generations: int
    # The policy's version when it began.
    version: int
    settings: StepSettings = StepSettings()
    notes: list[str] = []
    state: State = "running"
    error: str | None = None
    asked: bool = False
    outcomes: dict[int, Outcome] = {}
    metrics: dict[str, float] = {}
    checkpoints: dict[str, dict[str, Any]] = {}
    last_checkpoint: str | None = None


@dataclass
class Job:
    """One job. The gateway's event loop is its only user, and writes without leaving it."""

    folder: Path
    file: JobFile
    # Round → what was sent for it, of rounds that have not ended; the newest is open unless `closed` says so.
    rounds: dict[int, list[Batch]] = field(default_factory=dict)
    # Batch id → the round it was taken into, and its digest.
    batches: dict[int, tuple[int, str]] = field(default_factory=dict)
    # Digests of the groups of rounds that were given to the queue: what a group is a copy of.
    contents: set[str] = field(default_factory=set)
    # The round that takes groups in; those before it are to be trained, or have been.
    open: int = 1
    listed: list[int] = field(default_factory=list)
    # Samples there were when the last round was closed: what came since is of the round to come.
    sampled: int = 0
    # The round whose validation was handed on.
    measured: int = 0
    touched: float = field(default_factory=time.monotonic)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.file.id

    @property
    def waiting(self) -> list[int]:
        """The rounds to train, oldest first."""
        return sorted(number for number in self.rounds if number < self.open)

    @property
    def trained(self) -> int:
        """How many optimizer steps it has made."""
        return sum(outcome.kind == "trained" for outcome in self.file.outcomes.values())

    @property
    def untrained_in_a_row(self) -> int:
        """How many of its last rounds had nothing to train."""
        kinds = [outcome.kind for _, outcome in sorted(self.file.outcomes.items())]
        trained = [place for place, kind in enumerate(kinds) if kind == "trained"]
        return len(kinds) - 1 - trained[-1] if trained else len(kinds)

    def version_at(self, number: int) -> int | None:
        """The version that round `number` left; None while it is the last, whatever it leaves."""
        ended = max(self.file.outcomes, default=0)
        if number >= ended:
            return None
        before = [one for one in self.file.outcomes if one <= number]
        return self.file.outcomes[max(before)].version if before else self.file.version

    @property
    def last_version(self) -> int:
        """The version that its last round left."""
        outcomes = self.file.outcomes
        return outcomes[max(outcomes)].version if outcomes else self.file.version

    # ------------------------------------------------------------------ what changes it

    def take(self, posted: Posted) -> None:
        """Take a batch in: once its line is on disk it is of the open round. Raises OSError."""
        contents = [digest_of([members]) for members in posted.groups]
        batch = Batch(
            batch=posted.batch, digest=posted.digest, contents=contents, groups=posted.groups,
            metrics=posted.metrics,
        )  # fmt: skip
        _append(self._round(self.open), batch.model_dump(mode="json", exclude_defaults=True))
        failpoints.passing("arbor.taken")
        self.rounds.setdefault(self.open, []).append(batch)
        self.batches[posted.batch] = (self.open, posted.digest)

    def close(self) -> bool:
        """Let the open round be trained; whether there was anything in it."""
        if self.open not in self.rounds:
            return False
        self.open += 1
        self.idle.clear()
        return True

    def discard(self) -> int:
        """Leave out what was sent and is not being trained yet; how many batches that was. Raises OSError."""
        left = self.rounds.pop(self.open, [])
        if left:
            self._compact(self.open, left)
            self.open += 1
        return len(left)

    def end(self, number: int, outcome: Outcome) -> None:
        """A round has ended. Raises OSError; then it ends once more."""
        self.file.outcomes = self.file.outcomes | {number: outcome}
        if outcome.kind == "failed":
            self.file.state, self.file.error = "failed", outcome.error
        self.save()
        self._compact(number, self.rounds.get(number, []))
        self.rounds.pop(number, None)
        if not self.waiting:
            self.idle.set()

    def save(self) -> None:
        """Write the job's facts, whole. Raises OSError."""
        (self.folder / _ROUNDS).mkdir(parents=True, exist_ok=True)
        files.write_json(self.folder / _JOB, self.file.model_dump(mode="json"), durable=True)

    def remove(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _compact(self, number: int, batches: Iterable[Batch]) -> None:
        """Keep of a round by what it is known when it comes again."""
        kept = {"batch", "digest", "contents"}
        lines = [one.model_dump_json(include=kept, exclude_defaults=True) + "\n" for one in batches]
        path = self._round(number)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text("".join(lines))
        os.replace(partial, path)

    def _round(self, number: int) -> Path:
        return self.folder / _ROUNDS / f"{number:06d}.jsonl"

    # ------------------------------------------------------------------ after a restart

    @classmethod
    def read(cls, folder: Path) -> Job | None:
        """The job in a folder; None where it was not begun whole. A line cut by a power loss goes: nobody
        was told that it was taken in."""
        try:
            file = JobFile.model_validate(files.read_json(folder / _JOB))
        except (OSError, ValueError) as error:
            log.warning("%s holds no job: %s", folder.name, error)
            return None
        job = cls(folder, file)
        for path in sorted((folder / _ROUNDS).glob("[0-9]*.jsonl")):
            job._take_up(int(path.stem), path)
        job.open = max((*job.rounds, *(number + 1 for number in file.outcomes)), default=1)
        if not job.waiting:
            job.idle.set()
        return job

    def _take_up(self, number: int, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
        found = [Batch.model_validate_json(line) for line in whole.splitlines()]
        self.batches |= {batch.batch: (number, batch.digest) for batch in found}
        if number not in self.file.outcomes and any(batch.groups for batch in found):
            self.rounds[number] = found
        else:
            self.contents.update(digest for batch in found for digest in batch.contents)


def read_all(root: Path) -> dict[str, Job]:
    """Every job on disk by its id, the oldest first."""
    found = [Job.read(folder) for folder in root.glob("*-*-*") if folder.is_dir()]
    jobs = sorted((job for job in found if job is not None), key=lambda job: job.file.created)
    return {job.id: job for job in jobs}


def new(root: Path, file: JobFile) -> Job:
    """Begin a job on disk. Raises OSError."""
    folder = job_names.folder_of(file.id)
    assert folder is not None
    job = Job(root / folder, file)
    job.save()
    job.idle.set()
    return job


def _append(path: Path, value: dict[str, Any]) -> None:
    """A line more, on disk when this returns; none of it where the disk is full. Raises OSError."""
    line = json.dumps(value).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
    if not before:
        files.sync(path.parent)
