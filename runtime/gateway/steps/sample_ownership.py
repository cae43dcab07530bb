"""Assigns samples to steps, so that no two steps train the same one.

Neighbours: selection.py asks whose a sample is, and how old; queue.py and handover.py tell what a step takes;
step_records.py has each step's samples on disk. Knows nothing of the trainer or of a step's outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.gateway.http.warnings import Warnings
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.shared.statuses import ENDED


class SampleOwnership:
    """The gateway's event loop is its only user."""

    def __init__(self, folder: StepFolder, max_staleness: int) -> None:
        self._folder = folder
        self.max_staleness = max_staleness
        # Sample id → the step that has it; given free when the step fails.
        self._owners: dict[str, int] = {}
        # Steps by which a sample's age is counted.
        self.committed: set[int] = set()
        self.warnings = Warnings()
        # Held while samples are sorted, so that no two steps find the same ones free.
        self.sorting = asyncio.Lock()

    def is_owned(self, sample: str) -> bool:
        """Whether a step has the sample."""
        return sample in self._owners

    def taken_from(self, number: int | None) -> Callable[[str], bool]:
        """Whether another step than this one has a sample now, for any thread to ask. None: a step that has
        none yet."""
        owners = dict(self._owners)
        return lambda sample: owners.get(sample, number) != number

    def staleness_of(self) -> Callable[[int], int]:
        """How many steps are committed now since a version, for any thread to ask."""
        committed = frozenset(self.committed)
        return lambda version: sum(one > version for one in committed)

    def remember(self, step: Step) -> None:
        """The step owns its samples, unless it ended before it was trained."""
        if step.committed or step.state not in ENDED:
            self._owners.update(dict.fromkeys(step.samples, step.id))

    def add(self, step: Step, samples: list[str]) -> None:
        """Record, before the step is trained, samples that it got since it was accepted. Raises OSError."""
        if late := [sample for sample in samples if self._owners.get(sample) != step.id]:
            step.samples = list(dict.fromkeys([*step.samples, *late]))  # a full disk is asked again
            self._folder.queue(step)
            self._owners.update(dict.fromkeys(late, step.id))

    def release(self, step: Step) -> None:
        """The step trains nothing, so its samples are free again."""
        for sample in step.samples:
            if self._owners.get(sample) == step.id:
                del self._owners[sample]
