"""The queue of training steps: taken in once per key, given to the trainer one at a time, published.

Neighbours: the gateway's routes submit and wait; step_registry.py has every step, step_records.py has each on
disk first, sample_ownership.py has its samples; handover.py gives it to the trainer and waits for its commit;
`publish` (publishing.py's) serves the commit. Knows nothing of HTTP, engines, batches or tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runtime.gateway.http.step_errors import (
    NothingToTrainError,
    NotPublishedError,
    SettingsRefusedError,
    UnknownCheckpointError,
    UnknownStepError,
)
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.empty_steps import EmptyStep, EmptySteps
from runtime.gateway.steps.examples import Render, counted
from runtime.gateway.steps.handover import EmptiedError, Handover, NotTrainedError
from runtime.gateway.steps.rewind import Rewind
from runtime.gateway.steps.rollout_log import RolloutLog
from runtime.gateway.steps.sample_ownership import SampleOwnership
from runtime.gateway.steps.selection import Selection, is_known, select_for
from runtime.gateway.steps.step_records import Step, StepFolder, check_size, digest_of, request_payload
from runtime.gateway.steps.step_registry import StepRegistry
from runtime.shared import failpoints
from runtime.shared.checkpoint import Checkpoint, CheckpointError, CheckpointStore, checkpoint_name
from runtime.shared.metrics import line_of
from runtime.shared.schema import Group, StepRequest
from runtime.shared.start_adapter_layout import KEY, START, StartAdapterError
from runtime.shared.statuses import ENDED, CheckpointInfo, StepCounts, StepState, StepStatus
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_config import ResolvedTrainConfig, TrainConfig

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
DISK_SECONDS = 2.0  # a disk that takes nothing is tried again this often

Publish = Callable[[Checkpoint], Awaitable[dict[str, Any]]]
# Makes members given by content into members given by sample; the second argument: whether a step has it.
Resolve = Callable[[list[Group], Callable[[str], bool]], Awaitable[list[Group]]]


class StepQueue:
    """All steps of the run. The gateway's event loop is its only user."""

    def __init__(
        self,
        state_dir: Path,
        samples: SampleStore,
        checkpoints: CheckpointStore,
        publish: Publish,
        *,
        trainer_failure: Callable[[], str | None],
        max_staleness: int,
        train: TrainConfig | None = None,
        resolve: Resolve | None = None,
        learn: Render | None = None,
        rollout_log: RolloutLog | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self._samples = samples
        self._folder = StepFolder(state_dir / "steps")
        self._publish = publish
        self._train = train or TrainConfig()
        self._resolve = resolve
        self._rewind = Rewind.read(state_dir)
        self._ownership = SampleOwnership(self._folder, max_staleness)
        self._steps = StepRegistry(self._folder, self._ownership)
        self._rollout_log = rollout_log
        self.has = self._ownership.is_owned
        # called for each step: its groups have ended
        self.taken: Callable[[list[Group]], None] = lambda groups: None
        self.warnings = self._ownership.warnings
        self._handover = Handover(
            self._folder,
            self._ownership,
            samples,
            checkpoints,
            trainer_failure,
            rollout_log,
            self._train,
            learn,
        )
        self._wake = asyncio.Event()
        self._client_state: dict[str, Any] | None = None
        self._metrics: dict[str, float] = {}
        # Of the newest committed step, as metrics.jsonl has it or is about to.
        self.last_line: dict[str, Any] | None = None
        self.trouble: str | None = None
        # The disk's error since a step could not be stored; None once one was.
        self.disk: str | None = None
        self._steps.recover(checkpoints.readable())
        self._empty = EmptySteps(state_dir, self._steps.next_id - 1)
        # Whether the run's first adapter is still to be served; until then no request reaches the policy.
        self.starting = (state_dir / START).is_dir() and self._begin()

    @property
    def queued(self) -> int:
        """Steps not yet ended."""
        return self._steps.queued

    @property
    def client_state(self) -> dict[str, Any] | None:
        """The program's state as of the newest committed step, or of an empty one since."""
        empty = self._newest_empty()
        return self._client_state if empty is None else empty["client_state"]

    @property
    def last_metrics(self) -> dict[str, float]:
        """The metrics of the step that has brought the `client_state`."""
        empty = self._newest_empty()
        return self._metrics if empty is None else empty["metrics"]

    def _newest_empty(self) -> dict[str, Any] | None:
        oldest_open = self._steps.next()
        committed = max(self._ownership.committed, default=0)
        return self._empty.newest_after(committed, None if oldest_open is None else oldest_open.id)

    @property
    def empty(self) -> int:
        """The number of empty steps."""
        return len(self._empty)

    def list(self) -> Sequence[StepStatus]:
        """Every step that has a number, oldest first."""
        return [step.status for step in self._steps.in_order()]

    async def submit(self, request: StepRequest) -> StepStatus:
        """Take a step in, once per key; an empty one gets its answer and no number.

        Raises a StepError, or OSError if the disk takes nothing.
        """
        try:
            taken = await self._submit(request)
        except OSError as error:
            self.disk = str(error)
            raise
        self.disk = None
        return taken

    async def _submit(self, request: StepRequest) -> StepStatus:
        check_size(request.client_state)
        digest = digest_of(request_payload(request))
        if known := self._known(request.key, digest):
            return known
        settings = self._settings_of(request)
        if request.examples:
            return self._add(self._supervised(request, digest))
        if self._rewind is not None:
            self._rewind.check(
                request.groups,
                lambda member: is_known(member, self._samples),
                steps_taken_since=self._steps.next_id > self._rewind.to_step + 1,
            )
        groups = list(request.groups)
        if self._resolve is not None:
            groups = await self._resolve(groups, self._ownership.is_owned)
            if known := self._known(request.key, digest):  # taken in while texts were looked up
                return known
        async with self._ownership.sorting:
            if known := self._known(request.key, digest):  # taken in while another step was sorted
                return known
            selection = await select_for(None, groups, self._samples, self._ownership)
            after = self._steps.next_id - 1
            if not selection.samples:
                await self._log_empty(after, selection, {})
                raise NothingToTrainError(selection.counts)
            empty = await asyncio.to_thread(EmptyStep.of_selection, selection, self._samples, settings)
            if empty is not None:
                self.taken(groups)
                status = self._empty.add(request.key, digest, empty, after, request.client_state)
                await self._log_empty(after, selection, empty.reasons)
                return status
            step = Step(
                self._steps.next_id, request.key, digest, "train", groups, request.client_state,
                counts=selection.counts, samples=selection.ids, settings=request.settings,
            )  # fmt: skip
            return self._add(step)

    async def restore(self, name: str, key: str, client_state: dict[str, Any] | None = None) -> StepStatus:
        """Take in a step that goes back to a kept checkpoint.

        Raises a StepError.
        """
        check_size(client_state)
        digest = digest_of({"restore": name, "client_state": client_state})
        if known := self._known(key, digest):
            return known
        kept = await self._checkpoint(name)
        if known := self._known(key, digest):  # taken in while we looked
            return known
        state = kept.client_state if client_state is None else client_state
        step = Step(self._steps.next_id, key, digest, "restore", source=name, client_state=state)
        return self._add(step)

    async def pin(self, name: str, best_of: str | None = None) -> CheckpointInfo:
        """Keep a checkpoint, as the best of some work if that is named.

        Raises UnknownCheckpointError, OSError.
        """
        await self._checkpoint(name)
        try:
            return await asyncio.to_thread(self.checkpoints.pin, name, best_of)
        except CheckpointError as error:  # not whole, or pruned meanwhile
            raise UnknownCheckpointError(str(error)) from error

    async def wait(self, number: int, seconds: float, committed: bool = False) -> StepStatus:
        """The step once it has ended (or is `committed`), or the wait has.

        Raises UnknownStepError, RewoundError.
        """
        step = self._steps.get(number)
        if step is None and self._rewind is not None and number > self._rewind.to_step:
            raise self._rewind.error(f"step {number} is")
        if step is None:
            raise UnknownStepError(f"there is no step {number}")
        with contextlib.suppress(TimeoutError):
            awaited = step.trained if committed and not step.ended.is_set() else step.ended
            await asyncio.wait_for(awaited.wait(), seconds)
        return step.status

    async def run(self) -> None:
        """Drive the steps to their ends, in order, for ever. Raises StartAdapterError."""
        await self._catch_up()
        while True:
            if why := self.start_failure:
                raise StartAdapterError(why)
            step = self._steps.next()
            if step is None:
                await self._idle()
                continue
            try:
                await self._drive_or_fail(step)
            except OSError as error:  # a full disk above all: nothing of the step is lost by waiting
                log.warning("step %d waits: %s", step.id, error)
                self.trouble = f"step {step.id} waits: {error}"
                await asyncio.sleep(DISK_SECONDS)

    async def _idle(self) -> None:
        """Wait for a step; meanwhile try again to serve a committed version that is not served."""
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), None if self.trouble is None else RETRY_SECONDS)
        except TimeoutError:
            await self._catch_up()

    @property
    def start_failure(self) -> str | None:
        """The reason the trainer cannot take the run's initial adapter."""
        first = self._steps.by_key(KEY)
        return first.error if self.starting and first is not None and not first.committed else None

    def _begin(self) -> bool:
        """Take in the run's first step, once; whether anything is still to come before the run has begun."""
        first = self._steps.by_key(KEY)
        if first is None and self._steps.next_id == 1:
            first = Step(1, KEY, digest_of({"restore": START}), "restore", source=START)
            self._add(first)
        return (
            max(self._ownership.committed, default=0) <= 1
            and first is not None
            and first.state != "published"
        )

    # ------------------------------------------------------------------ one step

    async def _drive_or_fail(self, step: Step) -> None:
        """One step must not cost the others theirs. Raises OSError."""
        try:
            await self._drive(step)
        except OSError:
            raise
        except Exception as error:
            log.error("step %d", step.id, exc_info=error)
            self._fail(step, f"{type(error).__name__}: {error}")

    async def _drive(self, step: Step) -> None:
        is_open = step.state in ("queued", "training")
        if is_open and (found := self._empty.find(step.key, step.digest)) is not None:
            self._end_empty(step, found)  # a process before this one had found it empty, and died
            return
        try:
            if step.state == "queued":
                if step.kind == "supervised" and step.client_state is None:
                    step.client_state = self.client_state  # the state of the program that trains beside it
                await self._dispatch(step)
            if step.state == "training":
                self._commit(step, await self._handover.until_committed(step))
        except EmptiedError as error:
            empty, after = error.empty, step.id - 1
            found = self._empty.add(step.key, step.digest, empty, after, step.client_state, step.id)
            if error.selection is not None:
                await self._log_empty(after, error.selection, empty.reasons)
            self._end_empty(step, found)
            return
        except NotTrainedError as error:
            self._fail(step, str(error))
            return
        if step.state == "committed":
            checkpoint = await asyncio.to_thread(self.checkpoints.load, checkpoint_name(step.id))
            failpoints.failpoint("gateway.committed")
            following = partial(self._steps.following, step.id)
            publishing = self._publish_step(step, checkpoint)
            await self._handover.overlap_publish(publishing, following, self._wake, self._dispatch)
        elif step.state in ENDED:  # its end could not be written
            self._end(step)

    async def _dispatch(self, step: Step) -> None:
        committed = max(self._ownership.committed, default=0)
        await self._handover.dispatch(step, self._empty.between(committed, step.id))

    def _commit(self, step: Step, checkpoint: Checkpoint) -> None:
        step.state, step.committed = "committed", True
        self._ownership.committed.add(step.id)
        self._note_checkpoint(checkpoint)
        step.metrics = self._metrics
        step.counts = StepCounts.model_validate(checkpoint.state["counts"])
        step.trained.set()

    def _note_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._client_state = checkpoint.state.get("client_state")
        self.last_line = line_of(checkpoint.manifest, checkpoint.state)
        # A number that is not finite has no place in JSON; metrics.jsonl keeps it.
        metrics = checkpoint.state.get("metrics", {})
        self._metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}

    async def _publish_step(self, step: Step, checkpoint: Checkpoint) -> None:
        try:
            step.publication = await self._publish(checkpoint)
        except NotPublishedError as error:
            self._fail(step, str(error))
            return
        self.trouble, self.disk, self.starting = None, None, False
        step.state = "published"
        self._end(step)

    def _fail(self, step: Step, error: str) -> None:
        log.error("step %d failed: %s", step.id, error)
        if not step.committed:
            self._give_up(step, "failed", error)
            return
        step.state, step.error = "failed", f"committed, but not published: {error}"
        self.trouble = f"step {step.id} is {step.error}"
        self._end(step)

    def _end_empty(self, step: Step, found: StepStatus) -> None:
        """The step has become empty: `found` is the answer to its key for good."""
        step.counts, step.metrics = found.counts, found.metrics
        self._give_up(step, "empty", found.error or "")

    def _give_up(self, step: Step, state: StepState, error: str) -> None:
        """The step is never trained: its samples are free again, and the trainer goes on with the next."""
        self._ownership.release(step)
        self._folder.withdraw(step.id, error)
        step.state, step.error = state, error
        self._end(step)

    def _end(self, step: Step) -> None:
        failpoints.failpoint("gateway.ending")
        self._folder.write_outcome(step)
        step.release()
        step.trained.set()
        step.ended.set()

    # ------------------------------------------------------------------ taking in

    async def _log_empty(self, after: int, selection: Selection, reasons: dict[str, str]) -> None:
        if self._rollout_log is not None:
            await asyncio.to_thread(self._rollout_log.write_empty, after, selection, self._samples, reasons)

    def _supervised(self, request: StepRequest, digest: str) -> Step:
        """The step that imitates; its examples become ids when its turn comes. Raises NothingToTrainError."""
        counts = counted(request.examples)
        if not counts.samples:
            raise NothingToTrainError(counts)
        return Step(
            self._steps.next_id, request.key, digest, "supervised", client_state=request.client_state,
            counts=counts, settings=request.settings, examples=request.examples,
        )  # fmt: skip

    def _known(self, key: str, digest: str) -> StepStatus | None:
        """The answer to a key that has been sent before. Raises KeyReusedError, QueueFullError."""
        if empty := self._empty.find(key, digest):
            return empty
        known = self._steps.find(key, digest)
        return None if known is None else known.status

    def _settings_of(self, request: StepRequest) -> ResolvedTrainConfig:
        try:
            return resolve(self._train, request.settings, step=1, supervised=bool(request.examples)).train
        except SettingsError as error:
            raise SettingsRefusedError(str(error), error.key) from None

    def _add(self, step: Step) -> StepStatus:
        self._steps.add(step)
        self.taken(step.groups)
        self._wake.set()
        return step.status

    async def _checkpoint(self, name: str) -> CheckpointInfo:
        kept = await asyncio.to_thread(self.checkpoints.list)
        found = next((info for info in kept if info.name == name), None)
        if found is None:
            raise UnknownCheckpointError(
                f"there is no checkpoint {name!r}; kept: {[info.name for info in kept]}"
            )
        return found

    # ------------------------------------------------------------------ after a restart

    async def _catch_up(self) -> None:
        """Serve the newest committed state: a crash may have come between commit and publication (C40)."""
        newest = await asyncio.to_thread(self.checkpoints.newest)
        if newest is None:
            return
        self._note_checkpoint(newest)
        step = self._steps.get(newest.step)
        if step is not None and (step.state == "published" or not step.ended.is_set()):
            return  # served already, or the queue is about to publish it
        try:
            publication = await self._publish(newest)
        except (NotPublishedError, OSError) as error:
            self.trouble = f"step {newest.step} is committed, but not published: {error}"
            return
        self.trouble, self.starting = None, False
        if step is not None:
            step.state, step.publication, step.error = "published", publication, None
            with contextlib.suppress(OSError):  # else it is served again by the next process
                self._end(step)
