"""Every step that the run has taken in: by its number, by its key, and after a restart from the disk.

Neighbours: queue.py takes steps in and drives them; step_records.py has each step on disk;
sample_ownership.py gets their samples. Knows nothing of a step's outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.gateway.http.step_errors import KeyReusedError, QueueFullError
from runtime.gateway.steps.sample_ownership import SampleOwnership
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.shared import failpoints
from runtime.shared.checkpoint import Checkpoint

MAX_QUEUED = 8


class StepRegistry:
    """The gateway's event loop is its only user."""

    def __init__(self, folder: StepFolder, ownership: SampleOwnership) -> None:
        self._folder = folder
        self._ownership = ownership
        self._steps: dict[int, Step] = {}
        self._by_key: dict[str, Step] = {}

    def recover(self, readable: Iterable[Checkpoint]) -> None:
        """Read the steps on disk. The queue's own files are only an index: missing entries are made again
        from the trainer's batches and checkpoints."""
        kept = {checkpoint.step: checkpoint.state for checkpoint in readable}
        for step in self._folder.read_all(kept):
            self._remember(step)
            if step.committed:
                self._ownership.committed.add(step.id)
        self._ownership.committed.update(number for number in kept if number > 0)

    def add(self, step: Step) -> None:
        """The step survives from here on. Raises OSError."""
        self._folder.queue(step)
        failpoints.failpoint("gateway.queued")
        self._remember(step)

    def find(self, key: str, digest: str) -> Step | None:
        """The step that has the key. Raises KeyReusedError, QueueFullError if a new one has no place."""
        step = self._by_key.get(key)
        if step is not None and step.digest != digest:
            raise KeyReusedError(f"key {key!r} belongs to step {step.id}, which had a different body")
        if step is None and self.queued >= MAX_QUEUED:
            raise QueueFullError(f"{MAX_QUEUED} steps are already waiting")
        return step

    def by_key(self, key: str) -> Step | None:
        """The step with this key, with any body."""
        return self._by_key.get(key)

    def get(self, number: int) -> Step | None:
        """The step of that number."""
        return self._steps.get(number)

    def in_order(self) -> list[Step]:
        """Every step, oldest first."""
        return [step for _, step in sorted(self._steps.items())]

    def next(self) -> Step | None:
        """The oldest that has not ended."""
        return next((step for step in self.in_order() if not step.ended.is_set()), None)

    def following(self, number: int) -> Step | None:
        """The oldest after that one which has not ended, where it is to be trained and waits for its turn."""
        later = (step for step in self.in_order() if step.id > number and not step.ended.is_set())
        step = next(later, None)
        return step if step is not None and (step.kind, step.state) == ("train", "queued") else None

    @property
    def queued(self) -> int:
        """Steps not yet ended."""
        return sum(not step.ended.is_set() for step in self._steps.values())

    @property
    def next_id(self) -> int:
        """The id of the next step."""
        return max((*self._steps, *self._ownership.committed), default=0) + 1

    def _remember(self, step: Step) -> None:
        self._steps[step.id] = step
        self._by_key[step.key] = step
        self._ownership.remember(step)
