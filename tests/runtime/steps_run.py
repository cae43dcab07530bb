"""The queue of steps with a trainer that is played: a test says when a step commits or fails.

The trainer's side of the folder protocol is `Run.commit`, with the real checkpoint store. The real trainer
takes part in test_runtime.py.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from runtime.gateway.http.step_errors import NotPublishedError
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.steps.rollout_log import RolloutLog
from runtime.shared.batch import read_batch
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, Checkpoint, CheckpointStore
from runtime.shared.schema import Group, Member, StepRequest
from runtime.shared.train_config import TrainConfig
from tests.runtime.recorded import sampled
from tests.support.waiting import wait_until_async

# Shorter than a queue waits before it tries again by itself (RETRY_SECONDS): what is seen, it did at once.
SOON_SECONDS = 25.0


class Run:
    """One state folder; `queue()` is a new process of the gateway on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = CheckpointStore(folder / "checkpoints")
        self.published: list[int] = []
        self.refuse: str | None = None
        # Set: the disk is full for a publication.
        self.full = asyncio.Event()
        # Cleared: a publication waits for it.
        self.engines = asyncio.Event()
        self.engines.set()
        self.trainer_failure: str | None = None

    def queue(
        self, max_lag: int = 2, train: TrainConfig | None = None, rollout_log: RolloutLog | None = None
    ) -> StepQueue:
        self.samples = SampleStore(self.folder / "samples")
        return StepQueue(
            self.folder,
            self.samples,
            self.checkpoints,
            self.publish,
            trainer_failure=lambda: self.trainer_failure,
            max_staleness=max_lag,
            train=train,
            rollout_log=rollout_log,
        )

    async def publish(self, checkpoint: Checkpoint) -> dict[str, Any]:
        await self.engines.wait()
        if self.full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.refuse is not None:
            raise NotPublishedError(self.refuse)
        self.published.append(checkpoint.version)
        return {"version": checkpoint.version}

    def request(self, key: str, *rollouts: str, version: int = 0, **more: Any) -> StepRequest:
        """A step over fresh samples of these rollouts."""
        for rollout in rollouts:
            sampled(self.samples, rollout, version)
        members = [Member(rollout=rollout, reward=float(index)) for index, rollout in enumerate(rollouts)]
        return StepRequest(key=key, groups=[Group(id="g", members=members)], **more)

    async def commit_two(self, queue: StepQueue) -> None:
        """Two steps are committed, and the first one's publication waits for `engines`."""
        self.engines.clear()
        await queue.submit(self.request("k1", "a", "b"))
        await queue.submit(self.request("k2", "c", "d"))
        await self.commit(1)
        await self.commit(2)  # given beside that publication

    async def fail_publication(self, queue: StepQueue) -> None:
        """Step 1 is committed, and not served as long as `refuse` says why."""
        self.refuse = "engine-0: gone"
        await queue.submit(self.request("k1", "a", "b"))
        await self.commit(1)
        assert (await queue.wait(1, SOON_SECONDS)).state == "failed"

    def batch_folder(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:06d}"

    async def commit(self, step: int) -> None:
        """What the trainer does with a batch, once it is there."""
        await wait_until_async(self.batch_folder(step).exists, SOON_SECONDS)
        batch = read_batch(self.batch_folder(step))
        state = {
            "counts": batch.meta.get("counts", {}),
            "metrics": {"loss": 0.5},
            **{name: batch.meta[name] for name in ("client_state", "key", "request_sha256", "kind")},
        }

        self.checkpoints.commit(step, step, state, write_weights)


def write_weights(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).parent.mkdir()
    (folder / ADAPTER_WEIGHTS).write_bytes(b"weights")


def drive(work: Callable[[Run], Awaitable[None]], folder: Path) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work(Run(folder))

    asyncio.run(bounded())


class Running:
    """A queue with its loop running, for the length of a `with`."""

    def __init__(self, queue: StepQueue) -> None:
        self._queue = queue

    async def __aenter__(self) -> StepQueue:
        self._task = asyncio.create_task(self._queue.run())
        return self._queue

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
