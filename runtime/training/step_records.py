"""What is on disk about steps: taken in, handed to the trainer, failed, ended.

    steps/queue/000007.json           the step as it was taken in
    steps/queue/000007.outcome.json   how it ended
    steps/000007/                     the batch (batch.py), from its hand-over on
    steps/000007/failed.json          the trainer could not do it, or must not any more

Neighbours: steps.py decides, this writes and reads; the trainer reads the numbered folders. Every file is
whole or absent.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime import files
from runtime.schema import Group, StepCounts, StepState, StepStatus
from runtime.training.batch import Batch, step_folder, write_batch

_FAILED = "failed.json"


@dataclass
class Step:
    """One step, as far as it has come."""

    id: int
    key: str
    digest: str
    kind: Literal["train", "restore"]
    groups: list[Group] = field(default_factory=list)
    client_state: dict[str, Any] | None = None
    source: str | None = None
    state: StepState = "queued"
    counts: StepCounts = field(default_factory=StepCounts)
    samples: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    publication: dict[str, Any] | None = None
    error: str | None = None
    # Also true of a failed step whose publication was what failed.
    committed: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> StepStatus:
        return StepStatus(
            id=self.id,
            key=self.key,
            state=self.state,
            version=self.id if self.committed else None,
            counts=self.counts,
            metrics=self.metrics,
            publication=self.publication,
            error=self.error,
        )


class StepFolder:
    """`steps/` on disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._queue = root / "queue"
        self._queue.mkdir(parents=True, exist_ok=True)

    def queue(self, step: Step) -> None:
        """Write a step taken in; after this it survives."""
        value = {
            "id": step.id, "key": step.key, "digest": step.digest, "kind": step.kind,
            "groups": [group.model_dump() for group in step.groups], "client_state": step.client_state,
            "source": step.source, "counts": step.counts.model_dump(), "samples": step.samples,
            "created": time.time(),
        }  # fmt: skip
        files.write_json(self._queue / f"{step.id:06d}.json", value, durable=True)

    def give(self, number: int, batch: Batch) -> None:
        """Hand a batch to the trainer: the rename is the hand-over."""
        write_batch(step_folder(self._root, number), batch)

    def failure(self, number: int) -> str | None:
        """What the trainer said when it could not do the step."""
        said = files.read_json(step_folder(self._root, number) / _FAILED)
        return None if said is None else str(said.get("error"))

    def withdraw(self, number: int, error: str) -> None:
        """Keep the trainer from ever training a step reported as failed, and from waiting for its folder."""
        folder = step_folder(self._root, number)
        if folder.exists():
            if not (folder / _FAILED).exists():
                files.write_json(folder / _FAILED, {"error": error}, durable=True)
            return
        # Whole or absent: a folder without its reason would be read as a batch.
        partial = self._root / f".tmp-{folder.name}-failed"
        partial.mkdir(exist_ok=True)
        files.write_json(partial / _FAILED, {"error": error}, durable=True)
        partial.rename(folder)
        files.sync_folder(self._root)

    def write_outcome(self, step: Step) -> None:
        """The end of a step, for the next process of the gateway."""
        value = step.status.model_dump()
        files.write_json(self._queue / f"{step.id:06d}.outcome.json", value, durable=True)

    def read_all(self) -> list[Step]:
        """Every step ever taken in, as far as it had come."""
        return [self._read(path) for path in sorted(self._queue.glob("??????.json"))]

    def _read(self, path: Path) -> Step:
        said = json.loads(path.read_text())
        step = Step(
            said["id"], said["key"], said["digest"], said["kind"],
            [Group.model_validate(group) for group in said["groups"]], said["client_state"], said["source"],
            counts=StepCounts.model_validate(said["counts"]), samples=said["samples"],
        )  # fmt: skip
        outcome = files.read_json(path.with_suffix(".outcome.json"))
        if outcome is not None:
            status = StepStatus.model_validate(outcome)
            step.state, step.counts, step.metrics = status.state, status.counts, status.metrics
            step.publication, step.error = status.publication, status.error
            step.committed = status.version is not None
            step.groups = []
            step.ended.set()
        elif step_folder(self._root, step.id).exists():
            step.state = "training"
        return step
