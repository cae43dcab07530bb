"""Drives fine-tuning jobs, the oldest first: a step for each batch of its file, epoch by epoch.

Neighbours: `jobs.py` has the jobs, `conversations.py` reads files; the queue of steps (`steps/queue.py`) does
the work, by keys made of job and step: after any crash, a step that was taken in is never taken again. Knows
nothing of tokens or of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

from runtime.gateway.fine_tuning.conversations import ConversationError, read
from runtime.gateway.fine_tuning.file_store import RESULTS, FileStore
from runtime.gateway.fine_tuning.jobs import EpochCheckpoint, Job, JobStore
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import NothingToTrainError, QueueFullError, StepError
from runtime.shared.schema import StepRequest, StepSettings, SupervisedExample
from runtime.shared.statuses import ENDED, CheckpointInfo, StepStatus

log = logging.getLogger(__name__)

_FULL_SECONDS = 1.0
_DISK_SECONDS = 2.0
_WAIT_SECONDS = 30.0


class Steps(Protocol):
    """The part of the step queue that is needed here."""

    async def submit(self, request: StepRequest) -> StepStatus: ...
    async def wait(self, number: int, seconds: float) -> StepStatus: ...
    async def pin(self, name: str, best_of: str | None = None) -> CheckpointInfo: ...


class JobRunner:
    """One job at a time. The gateway's event loop is its only user."""

    def __init__(
        self,
        jobs: JobStore,
        files: FileStore,
        steps: Steps,
        named: Callable[[int], str],
        learning_rate: float,
    ) -> None:
        """`named`: a version's name; `learning_rate`: the run's own, the base of a job's multiplier."""
        self._jobs = jobs
        self._files = files
        self._steps = steps
        self._named = named
        self._learning_rate = learning_rate
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is a job, or one was cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Drive jobs to their ends, for ever."""
        while True:
            self._wake.clear()
            job = self._jobs.waiting()
            if job is None:
                await self._wake.wait()
                continue
            try:
                await self._drive(job)
            except OSError as error:  # a full disk above all: nothing is lost by waiting
                log.warning("%s waits: %s", job.id, error)
                await asyncio.sleep(_DISK_SECONDS)

    async def _drive(self, job: Job) -> None:
        try:
            examples = await asyncio.to_thread(read, self._files.path(job.training_file))
        except (ConversationError, ApiError) as error:
            self._jobs.end(job, "failed", f"the training file cannot be used: {error}")
            return
        if job.ended:  # cancelled while the file was read
            return
        if job.status != "running":
            job.status = "running"
            self._jobs.save(job)
            self._jobs.say(job, f"training on {len(examples)} conversations, {_total(job, examples)} steps")
        try:
            await self._train(job, examples)
        except StepError as error:
            self._jobs.end(job, "failed", str(error))

    async def _train(self, job: Job, examples: list[SupervisedExample]) -> None:
        per_epoch = -(-len(examples) // job.hyperparameters.batch_size)
        while job.steps < _total(job, examples):
            epoch, place = divmod(job.steps, per_epoch)
            order = list(range(len(examples)))
            random.Random(f"{job.seed}/{epoch}").shuffle(order)
            size = job.hyperparameters.batch_size
            batch = [examples[index] for index in order[place * size : (place + 1) * size]]
            status = await self._step(job, batch, _total(job, examples))
            if job.ended:
                return
            if status is not None and status.state == "empty":
                self._say_empty(job, status.error)
                status = None
            if status is not None and status.state == "failed":
                self._jobs.end(job, "failed", f"step {status.id} failed: {status.error}")
                return
            await self._record_step(job, status, ends_epoch=place == per_epoch - 1)
        await self._succeed(job)

    async def _step(self, job: Job, batch: list[SupervisedExample], total: int) -> StepStatus | None:
        """One step to its end; None if nothing of the batch can be learned, or the job was cancelled."""
        request = StepRequest(
            key=f"{job.id}/{job.steps}", examples=batch, settings=self._settings(job, total)
        )
        while not job.ended:
            try:
                status = await self._steps.submit(request)
                break
            except QueueFullError:
                await asyncio.sleep(_FULL_SECONDS)
            except NothingToTrainError as error:
                self._say_empty(job, str(error))
                return None
        else:
            return None
        while status.state not in ENDED:
            status = await self._steps.wait(status.id, _WAIT_SECONDS)
        return status

    def _say_empty(self, job: Job, why: str | None) -> None:
        self._jobs.say(job, f"step {job.steps + 1} trained nothing: {why}", level="warn")

    def _settings(self, job: Job, total: int) -> StepSettings:
        given = job.settings or StepSettings()
        rate = (given.learning_rate or self._learning_rate) * job.hyperparameters.learning_rate_multiplier
        changed: dict[str, object] = {"learning_rate": rate, "schedule_step": job.steps}
        if given.schedule in ("linear", "cosine") and given.schedule_steps is None:
            changed["schedule_steps"] = total
        return given.model_copy(update=changed)

    async def _record_step(self, job: Job, status: StepStatus | None, *, ends_epoch: bool) -> None:
        """Record a trained step in the job."""
        job.steps += 1
        if status is not None:
            loss = status.metrics.get("loss")
            job.trained_tokens += status.counts.learned_tokens
            metrics = {"step": float(job.steps), "total_tokens": float(job.trained_tokens)}
            if loss is not None:
                job.losses.append((job.steps, loss))
                metrics["train_loss"] = loss
            if status.version is not None:
                job.fine_tuned_model = self._named(status.version)
            if ends_epoch and status.version is not None:
                await self._pin_epoch(job, status.version, metrics)
            self._jobs.say(job, f"step {job.steps}: loss {loss}", metrics=metrics)
        self._jobs.save(job)

    async def _pin_epoch(self, job: Job, version: int, metrics: dict[str, float]) -> None:
        """The policy after an epoch stays answerable by its name."""
        await self._steps.pin(f"step-{version:06d}")
        job.checkpoints.append(
            EpochCheckpoint(
                id=f"ftckpt-{job.id.removeprefix('ftjob-')}-{version}",
                created_at=int(time.time()),
                model=self._named(version),
                step_number=job.steps,
                metrics=metrics,
            )
        )

    async def _succeed(self, job: Job) -> None:
        if not job.checkpoints:
            self._jobs.end(
                job, "failed", "none of its conversations could be trained on; see the job's events"
            )
            return
        table = "step,train_loss\n" + "".join(f"{step},{loss:.6f}\n" for step, loss in job.losses)
        if not job.result_files:
            job.result_files = [(await self._files.add(table.encode(), "step_metrics.csv", RESULTS)).id]
        self._jobs.end(job, "succeeded", f"done: the model is {job.fine_tuned_model}")


def _total(job: Job, examples: list[SupervisedExample]) -> int:
    """How many steps the job takes."""
    return job.hyperparameters.n_epochs * -(-len(examples) // job.hyperparameters.batch_size)
