"""Hands a step to the trainer: builds its batch, then waits for its commit.

Neighbours: queue.py has the step before and after; selection.py chooses its trained samples,
batch_building.py makes the batch, or examples.py and sft_batch.py for a supervised step, and shared/batch.py
writes it; the trainer takes `steps/NNNNNN/` and commits `checkpoints/step-NNNNNN/`. Knows nothing of keys or
publications.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.batch_building import build
from runtime.gateway.steps.empty_steps import EmptyStep
from runtime.gateway.steps.examples import NotTokenisedError, Render
from runtime.gateway.steps.rollout_log import RolloutLog
from runtime.gateway.steps.sample_ownership import SampleOwnership
from runtime.gateway.steps.selection import Selection, select_for
from runtime.gateway.steps.sft_batch import build_sft_batch
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.shared import failpoints
from runtime.shared.batch import SCHEMA, Batch, empty_batch, write_batch
from runtime.shared.checkpoint import Checkpoint, CheckpointStore, checkpoint_name
from runtime.shared.learnable import learnable
from runtime.shared.statuses import StepCounts
from runtime.shared.step_settings import resolve
from runtime.shared.train_config import TrainConfig

_POLL_SECONDS = 0.02


class NotTrainedError(Exception):
    """The trainer cannot do the step, as it or the supervisor reports; the message is the reason."""


class EmptiedError(Exception):
    """Nothing of the step is left that teaches anything. `selection`: its rollouts; None of examples."""

    def __init__(self, empty: EmptyStep, selection: Selection | None = None) -> None:
        super().__init__(empty.why)
        self.empty = empty
        self.selection = selection


class Handover:
    """The exchange between the queue and the trainer. The gateway's event loop is its only user."""

    def __init__(
        self,
        folder: StepFolder,
        ownership: SampleOwnership,
        samples: SampleStore,
        checkpoints: CheckpointStore,
        trainer_failure: Callable[[], str | None],
        rollout_log: RolloutLog | None,
        train: TrainConfig,
        learn: Render | None = None,
    ) -> None:
        self._folder = folder
        self._ownership = ownership
        self._samples = samples
        self._checkpoints = checkpoints
        self._trainer_failure = trainer_failure
        self._rollout_log = rollout_log
        self._train = train
        self._learn = learn

    async def dispatch(self, step: Step, empty_before: dict[str, int]) -> None:
        """Write the batch for the trainer. Staleness is judged here, with all steps committed since.

        After an interrupted try the trainer may have the batch: then it is never built again. `empty_before`:
        the counts of the empty steps since the last one, for the run's sums. Raises OSError, and EmptiedError
        if nothing is left that teaches anything.
        """
        failpoints.failpoint("gateway.giving")
        if not self._folder.has_batch(step.id):
            batch = await self._batch(step, {"empty": empty_before})
            await asyncio.to_thread(write_batch, self._folder.of_batch(step.id), batch)
        failpoints.failpoint("gateway.given")
        step.state = "training"

    async def overlap_publish(
        self,
        work: Coroutine[Any, Any, None],
        following: Callable[[], Step | None],
        told: asyncio.Event,
        dispatch: Callable[[Step], Awaitable[None]],
    ) -> None:
        """Do `work`, the publication of a step, and meanwhile dispatch the step after it, once there is one.

        The trainer need not wait for engines. `told`: a step was taken in. Raises the errors of `work`; an
        error in dispatching the next step is raised at its turn.
        """
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                told.clear()
                if (step := following()) is not None:
                    with contextlib.suppress(Exception):  # any error is raised again at its turn
                        await dispatch(step)
                    break
                hearing = asyncio.ensure_future(told.wait())
                await asyncio.wait((working, hearing), return_when=asyncio.FIRST_COMPLETED)
                hearing.cancel()
            await working
        finally:
            working.cancel()  # if this was cancelled: ended work stays as it is

    async def _batch(self, step: Step, more: dict[str, Any]) -> Batch:
        meta = more | {
            "schema": SCHEMA, "kind": step.kind, "step": step.id, "key": step.key,
            "request_sha256": step.digest, "from": step.source, "client_state": step.client_state,
            "settings": step.settings_payload,
        }  # fmt: skip
        if step.kind == "restore":
            return empty_batch(meta)
        if step.kind == "supervised":
            return await self._supervised_batch(step, meta)
        async with self._ownership.sorting:
            selection = await select_for(step.id, step.groups, self._samples, self._ownership)
            self._ownership.add(step, selection.ids)
        if not selection.samples:
            raise EmptiedError(EmptyStep(selection.counts), selection)
        batch = await asyncio.to_thread(build, selection, self._samples, meta)
        settings = resolve(self._train, step.settings, step.id).train
        found = await asyncio.to_thread(learnable, batch, settings)
        if (empty := EmptyStep.of_batch(batch, found, selection)) is not None:
            raise EmptiedError(empty, selection)
        step.counts = StepCounts.model_validate(batch.meta["counts"])
        if self._rollout_log is not None:
            reasons = selection.why_untrained(found)
            await asyncio.to_thread(self._rollout_log.write, step.id, selection, self._samples, reasons)
        return batch

    async def _supervised_batch(self, step: Step, meta: dict[str, Any]) -> Batch:
        if self._learn is None:
            raise NotTrainedError("no engine can render examples")
        try:
            learned = await self._learn(step.examples)
        except NotTokenisedError as error:
            raise NotTrainedError(str(error)) from error
        if not learned.sequences:
            raise EmptiedError(EmptyStep(learned.counts))
        step.counts = learned.counts
        counts = {"counts": learned.counts.model_dump()}
        return await asyncio.to_thread(build_sft_batch, learned.sequences, meta | counts)

    async def until_committed(self, step: Step) -> Checkpoint:
        """The step's checkpoint, once the trainer has committed it. Raises NotTrainedError."""
        name = checkpoint_name(step.id)
        while not (self._checkpoints.root / name).exists():
            error = self._folder.failure(step.id) or self._trainer_failure()
            if error is not None:
                raise NotTrainedError(error)
            await asyncio.sleep(_POLL_SECONDS)
        return await asyncio.to_thread(self._checkpoints.load, name)
