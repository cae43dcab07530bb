"""The steps on disk: accepted, handed to the trainer, failed, ended.

    steps/queue/000007.json           the step as it was taken in
    steps/queue/000007.outcome.json its outcome
    steps/000007/                     the batch (batch.py), from its hand-over on
    steps/000007/failed.json          the trainer could not do it, or must not any more

Neighbours: queue.py decides, this writes and reads; the trainer reads the numbered folders. Every file is
whole or absent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.gateway.http.step_errors import ClientStateTooLargeError
from runtime.shared import json_files
from runtime.shared.batch import META, step_folder
from runtime.shared.schema import CLIENT_STATE_MAX_BYTES, Group, StepRequest, StepSettings, SupervisedExample
from runtime.shared.statuses import StepCounts, StepState, StepStatus

log = logging.getLogger(__name__)

_FAILED = "failed.json"


@dataclass
class Step:
    """One step, as far as it has come."""

    id: int
    key: str
    digest: str
    kind: Literal["train", "supervised", "restore"]
    groups: list[Group] = field(default_factory=list)
    client_state: dict[str, Any] | None = None
    source: str | None = None
    settings: StepSettings | None = None
    examples: list[SupervisedExample] = field(default_factory=list)
    state: StepState = "queued"
    counts: StepCounts = field(default_factory=StepCounts)
    samples: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    publication: dict[str, Any] | None = None
    error: str | None = None
    # Also true of a step that failed in its publication.
    committed: bool = False
    # It is committed, or has ended.
    trained: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Free the parts that are needed only before a step has ended."""
        self.groups, self.examples = [], []

    @property
    def settings_payload(self) -> dict[str, Any] | None:
        """The step's own settings as plain values; None if it has none."""
        return None if self.settings is None else self.settings.model_dump(exclude_none=True)

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


def request_payload(request: StepRequest) -> dict[str, Any]:
    """The request's content without its key. Absent fields are left out, so that a request that an older
    version accepted equals itself when it comes again after a resume."""
    absent = {name for name in ("examples", "settings") if not getattr(request, name)}
    payload = request.model_dump(mode="json", exclude={"key", *absent})
    for member in (one for group in payload["groups"] for one in group["members"]):
        for name in ("tool_calls", "samples"):
            if member[name] is None:
                del member[name]
        member.pop("metrics", None)  # they are for people: nothing of the step follows from them
    return payload


def check_size(client_state: dict[str, Any] | None) -> None:
    """Raises ClientStateTooLargeError."""
    if (size := len(json.dumps(client_state))) > CLIENT_STATE_MAX_BYTES:
        raise ClientStateTooLargeError(
            f"client_state has {size} bytes; the maximum is {CLIENT_STATE_MAX_BYTES}"
        )


def digest_of(request: Any) -> str:
    """The digest that tells a repeated request from another with the same key."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


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
            "source": step.source, "settings": step.settings_payload, "counts": step.counts.model_dump(),
            "samples": step.samples, "examples": [one.model_dump() for one in step.examples],
            "created": time.time(),
        }  # fmt: skip
        json_files.write_json(self._queue / f"{step.id:06d}.json", value, durable=True)

    def of_batch(self, number: int) -> Path:
        """The folder where the trainer finds a step's batch: the rename of it is the hand-over."""
        return step_folder(self._root, number)

    def has_batch(self, number: int) -> bool:
        """Whether the trainer has the step's batch, or the note that it must not train it. Raises OSError."""
        if not step_folder(self._root, number).exists():
            return False
        json_files.fsync(self._root)  # its rename, which may not have come so far
        return True

    def failure(self, number: int) -> str | None:
        """The trainer's reason for failing the step."""
        content = json_files.read_json(step_folder(self._root, number) / _FAILED)
        return None if content is None else str(content.get("error"))

    def withdraw(self, number: int, error: str) -> None:
        """Keep the trainer from ever training a step reported as failed, and from waiting for its folder."""
        folder = step_folder(self._root, number)
        if folder.exists():
            if not (folder / _FAILED).exists():
                json_files.write_json(folder / _FAILED, {"error": error}, durable=True)
            return
        # Whole or absent: a folder without its reason would be read as a batch.
        partial = self._root / f".tmp-{folder.name}-failed"
        partial.mkdir(exist_ok=True)
        json_files.write_json(partial / _FAILED, {"error": error}, durable=True)
        partial.rename(folder)
        json_files.fsync(self._root)

    def write_outcome(self, step: Step) -> None:
        """The end of a step, for the next process of the gateway."""
        value = step.status.model_dump()
        json_files.write_json(self._queue / f"{step.id:06d}.outcome.json", value, durable=True)

    # ------------------------------------------------------------------ after a restart

    def read_all(self, kept: Mapping[int, dict[str, Any]]) -> list[Step]:
        """Every step ever taken in, as far as it had come, in order. `kept`: step → state of its checkpoint.

        The queue's files that are lost or broken are made again, from the batches and the checkpoints.
        """
        numbers = {int(path.name[:6]) for path in self._queue.glob("[0-9]*.json")} | set(kept)
        numbers |= {int(path.name) for path in self._root.glob("[0-9]*") if path.name.isdigit()}
        newest = max(kept, default=0)
        # The trainer is a step ahead: while the newest is not served, nor may the one before it be, if that
        # was taken in here.
        is_served = (self._queue / f"{newest:06d}.outcome.json").exists()
        is_here = newest - 1 in kept and (self._queue / f"{newest - 1:06d}.json").exists()
        oldest_open = newest - 1 if is_here and not is_served else newest
        return [
            self._read(number, kept, oldest_open) or self._rebuild(number, kept, oldest_open)
            for number in sorted(numbers - {0})
        ]

    def _read(self, number: int, kept: Mapping[int, Any], oldest_open: int) -> Step | None:
        path = self._queue / f"{number:06d}.json"
        try:
            entry = json.loads(path.read_text())
            step = Step(
                entry["id"], entry["key"], entry["digest"], entry["kind"],
                [Group.model_validate(group) for group in entry["groups"]], entry["client_state"],
                entry["source"], _settings(entry.get("settings")),
                [SupervisedExample.model_validate(one) for one in entry.get("examples", ())],
                counts=StepCounts.model_validate(entry["counts"]), samples=entry["samples"],
            )  # fmt: skip
            outcome = json_files.read_json(path.with_suffix(".outcome.json"))
            if outcome is not None:
                _take_outcome(step, StepStatus.model_validate(outcome))
            elif number < oldest_open:
                raise ValueError("how it ended is not written")
            elif number in kept or self.has_batch(number):  # batches do not come from a lost machine
                step.state = "training"
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the queue's entry of step %d is made again: %s", number, error)
            return None
        return step

    def _rebuild(self, number: int, kept: Mapping[int, dict[str, Any]], oldest_open: int) -> Step:
        """A step's entry, made again. Its groups are not needed: its batch was given, or it fails."""
        state, given, newest = kept.get(number, {}), self._read_batch_meta(number), max(kept, default=0)
        if number > newest and not self.has_batch(number):
            self.withdraw(number, "its entry in the queue cannot be read, and the trainer never had it")
        error = self.failure(number)
        known = {name: state.get(name) or given.get(name) for name in ("key", "request_sha256", "kind")}
        step = Step(
            number,
            known["key"] or f"step {number}",
            known["request_sha256"] or "",
            known["kind"] or "train",
            client_state=state.get("client_state", given.get("client_state")),
            source=given.get("from"),
            counts=StepCounts.model_validate(state.get("counts") or given.get("counts") or {}),
            samples=[
                turn["id"]
                for one in given.get("samples", ())
                for turn in one.get("turns") or [one]
                if "id" in turn
            ],
            metrics={name: value for name, value in state.get("metrics", {}).items() if math.isfinite(value)},
            error=error,
            committed=error is None and number <= newest,
        )
        if error is None:
            # Of the newest it is not known whether it was published: it is published (again).
            is_open = number >= oldest_open
            step.state = "training" if number > newest else "committed" if is_open else "published"
        else:
            step.state = "failed"
        self.queue(step)
        if step.state in ("published", "failed"):
            self.write_outcome(step)
            step.ended.set()
        if step.state != "training":
            step.trained.set()
        return step

    def _read_batch_meta(self, number: int) -> dict[str, Any]:
        """The batch's entry about its step; empty for a step that was never handed over, or long removed."""
        try:
            return json_files.read_json(step_folder(self._root, number) / META) or {}
        except ValueError:
            return {}


def _settings(content: dict[str, Any] | None) -> StepSettings | None:
    return None if content is None else StepSettings.model_validate(content)


def _take_outcome(step: Step, status: StepStatus) -> None:
    step.state, step.counts, step.metrics = status.state, status.counts, status.metrics
    step.publication, step.error = status.publication, status.error
    step.committed = status.version is not None
    step.release()
    step.ended.set()
