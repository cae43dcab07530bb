"""Assigns samples to steps, so that no two steps train the same one.

Neighbours: queue.py asks when a step is taken in, handover.py when it is given out; selection.py sorts;
step_records.py has each step's samples on disk. Knows nothing of the trainer or of a step's outcome.
"""

from __future__ import annotations

import asyncio

from runtime.gateway.http.warnings import Warnings
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import Selection, Snapshot, select
from runtime.gateway.steps.sequence_splits import split_warning
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.shared.schema import Group
from runtime.shared.statuses import ENDED


class SampleOwnership:
    """The gateway's event loop is its only user."""

    def __init__(self, samples: SampleStore, folder: StepFolder, max_lag: int) -> None:
        self._samples = samples
        self._folder = folder
        self._max_lag = max_lag
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

    async def select(self, groups: list[Group], number: int | None) -> Selection:
        """Select in a thread, because it reads every token. The caller holds `sorting`.

        `number`: the step whose samples are its own; None for one that has none yet.
        """
        owners, committed = dict(self._owners), frozenset(self.committed)
        selection = await asyncio.to_thread(
            select,
            groups,
            Snapshot.of(groups, self._samples),
            taken=lambda sample: owners.get(sample, number) != number,
            staleness_of=lambda version: sum(one > version for one in committed),
            max_staleness=self._max_lag,
        )
        if line := split_warning(selection.counts):
            self.warnings.warn_once("sealed", line)
        return selection

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
