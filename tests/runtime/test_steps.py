"""The queue of steps: once per key, in order, whatever dies in between.

The trainer's side of the folder protocol is played here by `Trainer`, with the real checkpoint store, so that
each test decides when a step commits or fails. The real trainer takes part in test_runtime.py.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.http.step_errors import (
    ClientStateTooLargeError,
    KeyReusedError,
    NothingToTrainError,
    NotPublishedError,
    QueueFullError,
    RewoundError,
    SettingsRefusedError,
    UnknownCheckpointError,
    UnknownStepError,
)
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.claims import Claims
from runtime.gateway.steps.known_steps import MOST_QUEUED
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.steps.rollout_log import FOLDER, Said
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.shared import failpoints
from runtime.shared.batch import read_batch
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, Checkpoint, CheckpointStore
from runtime.shared.schema import Group, Member, StepRequest, StepSettings, StepStatus
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
        self.full = asyncio.Event()
        # Cleared: a publication waits for it.
        self.engines = asyncio.Event()
        self.engines.set()
        self.trainer_failure: str | None = None

    def queue(
        self, max_lag: int = 2, train: TrainConfig | None = None, said: Said | None = None
    ) -> StepQueue:
        self.samples = SampleStore(self.folder / "samples")
        return StepQueue(
            self.folder,
            self.samples,
            self.checkpoints,
            self.publish,
            trainer_failure=lambda: self.trainer_failure,
            max_lag=max_lag,
            train=train,
            said=said,
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


def test_a_step_goes_from_samples_to_a_published_version(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            queued = await queue.submit(run.request("k", "a", "b", client_state={"at": 7}))
            assert (queued.id, queued.state, queued.counts.trained) == (1, "queued", 2)
            await run.commit(1)
            done = await queue.wait(1, SOON_SECONDS)
            assert (done.state, done.version, done.metrics) == ("published", 1, {"loss": 0.5})
            assert done.publication == {"version": 1}
            assert done.counts.sampled_tokens == 6
            assert queue.client_state == {"at": 7}
            assert queue.list() == [done]

    drive(work, tmp_path)


def test_g18_a_key_is_one_step_however_often_and_to_whomever_it_is_sent(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k", "a", "b")
            answers = await asyncio.gather(*(queue.submit(request) for _ in range(5)))
            assert {answer.id for answer in answers} == {1}
            with pytest.raises(KeyReusedError):
                await queue.submit(request.model_copy(update={"client_state": {"other": True}}))
            await run.commit(1)
            first = await queue.wait(1, SOON_SECONDS)
        async with Running(run.queue()) as queue:  # another process of the gateway
            again = await queue.submit(request)
            assert again == first
            with pytest.raises(KeyReusedError):
                await queue.submit(request.model_copy(update={"client_state": {"other": True}}))
            assert len(queue.list()) == 1
        assert run.checkpoints.names() == ["step-000001"]

    drive(work, tmp_path)


@pytest.mark.parametrize("progress", ["queued", "given", "committed", "published"])
def test_c40_a_gateway_that_dies_at_any_point_ends_with_the_committed_version_served(
    tmp_path: Path, progress: str
) -> None:
    async def work(run: Run) -> None:
        dying = run.queue()
        await dying.submit(run.request("k", "a", "b"))
        if progress != "queued":
            async with Running(dying):
                await wait_until_async(run.batch_folder(1).exists, SOON_SECONDS)
                if progress == "published":
                    await run.commit(1)
                    await dying.wait(1, SOON_SECONDS)
        if progress == "committed":
            await run.commit(1)
        async with Running(run.queue()) as queue:
            if progress in ("queued", "given"):
                await run.commit(1)
            done = await queue.wait(1, SOON_SECONDS)
            await wait_until_async(lambda: run.published, SOON_SECONDS)
            assert (done.state, done.version) == ("published", 1)
            assert run.published[-1] == 1
            assert (await queue.submit(run.request("k2", "c", "d"))).id == 2

    drive(work, tmp_path)


def test_the_trainer_has_the_next_step_while_the_last_one_is_published(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await run.commit(1)
            committed = await queue.wait(1, SOON_SECONDS, committed=True)
            assert (committed.state, committed.version, committed.metrics) == ("committed", 1, {"loss": 0.5})
            # Taken in while the engines are at it, or there already: with the trainer at once, but no other.
            await queue.submit(run.request("k2", "c", "d"))
            await queue.submit(run.request("k3", "e", "f"))
            await run.commit(2)
            assert (await queue.wait(2, 0.1, committed=True)).state == "training"
            assert not run.published and not run.batch_folder(3).exists()
            run.engines.set()
            await run.commit(3)
            done = [await queue.wait(number, SOON_SECONDS) for number in (1, 2, 3)]
            assert [it.state for it in done] == ["published"] * 3 and run.published == [1, 2, 3]

    drive(work, tmp_path)


def test_a_step_that_was_given_beside_a_publication_that_fails_is_served_in_its_turn(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await queue.submit(run.request("k2", "c", "d"))
            await run.commit(1)
            await run.commit(2)
            run.refuse = "engine-0: served and trained logprobs differ"
            run.engines.set()
            assert (await queue.wait(1, SOON_SECONDS)).state == "failed"
            run.refuse = None
            await queue.submit(run.request("k3", "e", "f"))
            await run.commit(3)
            assert (await queue.wait(3, SOON_SECONDS)).state == "published" and run.published[-1] == 3
            assert all(read_batch(run.batch_folder(it)).meta["step"] == it for it in (1, 2, 3))

    drive(work, tmp_path)


@pytest.mark.parametrize("is_there", [False, True], ids=["before its batch is there", "after it"])
def test_g18_a_step_whose_giving_broke_off_beside_a_publication_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr("runtime.gateway.steps.queue.DISK_SECONDS", 0.01)
    in_the_way = tmp_path / "steps" / f".tmp-000002-{os.getpid()}"  # a file, where the batch is to be laid
    if is_there:
        monkeypatch.setattr(failpoints, "_ours", failpoints.Failpoints("gateway.given@2:full"))

    async def work(run: Run) -> None:
        async with Running(run.queue(said=Said(tmp_path, lambda: str))) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await queue.submit(run.request("k2", "c", "d"))
            if not is_there:
                in_the_way.write_text("")
            await run.commit(1)
            if is_there:
                await run.commit(2)  # the trainer has it, whatever the gateway was told
                sampled(run.samples, "c")  # too late for it, and some other step's
                run.engines.set()
            else:
                run.engines.set()
                for late in ((), ("c",), ()):  # tried once more from its beginning, after that has come
                    [sampled(run.samples, it) for it in late]
                    queue.trouble = None
                    await wait_until_async(lambda: "step 2 waits" in str(queue.trouble), SOON_SECONDS)
                in_the_way.unlink()
                await run.commit(2)
            done = [await queue.wait(number, SOON_SECONDS) for number in (1, 2)]
            assert [it.state for it in done] == ["published"] * 2 and run.published == [1, 2]
            trained = 2 if is_there else 3
            assert done[1].counts.trained == done[1].counts.samples == trained
            said = (tmp_path / FOLDER / "step-000002.jsonl").read_text().splitlines()
            assert [json.loads(it)["dropped"] for it in said] == [None] * trained
        again = StepRequest(key="k3", groups=[Group(id="g", members=[Member(rollout="c", reward=1.0)])])
        for later in (queue, run.queue()):  # the same process of the gateway, and the next one
            if not is_there:
                with pytest.raises(NothingToTrainError, match="2 already trained"):
                    await later.submit(again)
            else:
                assert (await later.submit(again)).counts.trained == 1

    drive(work, tmp_path)


def test_c39_a_step_of_which_nothing_is_left_beside_a_publication_fails_in_its_turn(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue(max_lag=0, said=Said(tmp_path, lambda: str))) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await queue.submit(run.request("k2", "c", "d"))
            await queue.submit(run.request("k3", "e", "f", version=1))
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS, committed=True)
            run.engines.set()
            await run.commit(3)
            first, none, last = [await queue.wait(number, SOON_SECONDS) for number in (1, 2, 3)]
            assert (first.state, none.state, last.state) == ("published", "failed", "published")
            assert none.counts.dropped == {"stale": 2} and none.version is None and none.counts.trained == 0
            assert [it.name for it in sorted((tmp_path / FOLDER).iterdir())] == [
                "step-000001.jsonl",
                "step-000003.jsonl",
            ]
            assert not queue.has(run.samples.of_rollout("c")[0].id)

    drive(work, tmp_path)


@pytest.mark.parametrize("lost", [False, True], ids=["the queue is whole", "its entry is broken"])
def test_c40_of_two_committed_steps_the_one_under_publication_is_served_first_after_a_restart(
    tmp_path: Path, lost: bool
) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as dying:
            run.engines.clear()
            await dying.submit(run.request("k1", "a", "b"))
            await dying.submit(run.request("k2", "c", "d"))
            await run.commit(1)
            await run.commit(2)
        if lost:
            (tmp_path / "steps" / "queue" / "000001.json").write_text("{")
        run.engines.set()
        async with Running(run.queue()) as queue:
            done = [await queue.wait(number, SOON_SECONDS) for number in (1, 2)]
            assert [it.state for it in done] == ["published"] * 2 and run.published == [1, 2]
            assert [it.publication for it in done] == [{"version": 1}, {"version": 2}]

    drive(work, tmp_path)


def test_a_sample_is_trained_once(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            await queue.submit(run.request("k1", "a", "b"))
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS)
        async with Running(run.queue()) as queue:
            again = StepRequest(key="k2", groups=[Group(id="g", members=[Member(rollout="a", reward=1.0)])])
            with pytest.raises(NothingToTrainError, match="1 already trained") as refused:
                await queue.submit(again)
            assert refused.value.counts.dropped == {"already trained": 1}

    drive(work, tmp_path)


def test_what_came_late_is_noted_once_though_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Step) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    folder = StepFolder(tmp_path / "steps")
    claims = Claims(SampleStore(tmp_path / "samples"), folder, max_lag=2)
    step = Step(1, "k", "digest", "train", samples=["a"])
    claims.remember(step)
    with monkeypatch.context() as disk:
        disk.setattr(folder, "queue", full)
        with pytest.raises(OSError, match="no space"):
            claims.add(step, ["a", "b"])
        assert not claims.has("b")
    claims.add(step, ["a", "b"])
    assert (step.samples, claims.has("b")) == (["a", "b"], True)


def test_a_sample_that_came_after_its_step_was_taken_in_is_trained_once_as_well(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        taken_in = await queue.submit(run.request("k1", "a", "b"))
        sampled(run.samples, "a")
        async with Running(queue):
            await run.commit(1)
            done = await queue.wait(1, 60)
            assert (taken_in.counts.trained, done.counts.trained) == (2, 3)
        again = StepRequest(key="k2", groups=[Group(id="g", members=[Member(rollout="a", reward=1.0)])])
        for later in (queue, run.queue()):  # the same process of the gateway, and the next one
            with pytest.raises(NothingToTrainError, match="2 already trained"):
                await later.submit(again)

    drive(work, tmp_path)


def test_of_two_steps_that_name_one_sample_at_the_same_time_one_gets_it(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        first = run.request("k1", "a", "b")
        second = first.model_copy(update={"key": "k2"})
        ends = await asyncio.gather(queue.submit(first), queue.submit(second), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["NothingToTrainError", "StepStatus"]

    drive(work, tmp_path)


def test_a_step_that_could_train_nothing_is_refused_and_says_why(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        sampled(run.samples, "greedy", temperature=0)
        members = [Member(rollout="greedy", reward=1.0), Member(rollout="unseen", reward=1.0)]
        with pytest.raises(NothingToTrainError, match="1 greedy, 1 no sample"):
            await queue.submit(StepRequest(key="k", groups=[Group(id="g", members=members)]))
        assert queue.list() == []
        assert (await queue.submit(run.request("k", "a"))).state == "queued"  # the key is still free

    drive(work, tmp_path)


def test_c60_a_steps_own_settings_reach_the_trainer_over_a_restart(tmp_path: Path) -> None:
    said = {"learning_rate": 3e-4, "schedule": "linear", "schedule_steps": 9, "scale_rewards": False}

    async def work(run: Run) -> None:
        await run.queue().submit(run.request("k1", "a", "b", settings=StepSettings(**said)))
        async with Running(run.queue()) as queue:
            await queue.submit(run.request("k2", "c", "d"))
            await run.commit(1)
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).state == "published"
        told = [read_batch(run.batch_folder(step)).meta["settings"] for step in (1, 2)]
        assert told == [said, None]

    drive(work, tmp_path)


def test_c60_settings_that_contradict_the_runs_are_refused_before_the_step_is_taken_in(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        queue = run.queue(train=TrainConfig(loss="gspo"))
        refused = run.request("k", "a", "b", settings=StepSettings(normaliser="token"))
        with pytest.raises(SettingsRefusedError, match="gspo clips whole answers") as error:
            await queue.submit(refused)
        assert error.value.key == "normaliser" and queue.list() == []
        allowed = refused.model_copy(update={"settings": StepSettings(loss="grpo", normaliser="token")})
        assert (await queue.submit(allowed)).id == 1, "the key and the samples are still free"

    drive(work, tmp_path)


def test_c39_staleness_is_judged_where_a_step_is_taken_out(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue(max_lag=1)) as queue:
            for number, names in enumerate(("ab", "cd", "ef"), start=1):
                taken_in = await queue.submit(run.request(f"k{number}", *names))
                assert taken_in.counts.trained == 2  # all sampled by version 0: fresh when taken in
            await run.commit(1)
            assert (await queue.wait(1, SOON_SECONDS)).state == "published"
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).state == "published"
            third = await queue.wait(3, SOON_SECONDS)
            assert third.state == "failed" and third.counts.dropped == {"stale": 2}
            assert json.loads((run.batch_folder(3) / "failed.json").read_text())["error"] == third.error
            await queue.submit(run.request("k4", "g", "h", version=2))
            await run.commit(4)
            assert (await queue.wait(4, SOON_SECONDS)).version == 4
            # What failed has made no answer older.
            lags = [
                json.loads((run.batch_folder(step) / "batch.json").read_text())["lags"] for step in (2, 4)
            ]
            assert lags == [{"0": 1}, {"2": 0}]

    drive(work, tmp_path)


def test_c45_a_full_queue_refuses_and_loses_nothing(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue(max_lag=MOST_QUEUED)
        for number in range(MOST_QUEUED):
            await queue.submit(run.request(f"k{number}", f"r{number}"))
        with pytest.raises(QueueFullError):
            await queue.submit(run.request("one more", "x"))
        assert (await queue.submit(run.request("k0", "r0"))).id == 1  # known: not one more
        async with Running(queue):
            for number in range(MOST_QUEUED):
                await run.commit(number + 1)
            assert (await queue.wait(MOST_QUEUED, SOON_SECONDS)).state == "published"

    drive(work, tmp_path)


def test_a_step_the_trainer_cannot_do_fails_with_its_words_and_gives_its_samples_back(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k1", "a", "b")
            await queue.submit(request)
            await wait_until_async(run.batch_folder(1).exists, SOON_SECONDS)
            (run.batch_folder(1) / "failed.json").write_text('{"error": "out of memory"}')
            failed = await queue.wait(1, SOON_SECONDS)
            assert (failed.state, failed.version, failed.error) == ("failed", None, "out of memory")
            second = await queue.submit(StepRequest(key="k2", groups=request.groups))
            assert second.counts.trained == 2
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).version == 2

    drive(work, tmp_path)


def test_a_trainer_that_is_gone_for_good_fails_the_step_and_it_is_never_trained_later(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            await queue.submit(run.request("k", "a", "b"))
            await wait_until_async(run.batch_folder(1).exists, SOON_SECONDS)
            run.trainer_failure = "the trainer failed: no such model"
            failed = await queue.wait(1, SOON_SECONDS)
            assert failed.error == "the trainer failed: no such model"
            assert (run.batch_folder(1) / "failed.json").exists()

    drive(work, tmp_path)


def test_a_publication_that_fails_is_said_and_the_next_one_mends_it(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.refuse = "engine-0: served and trained logprobs differ"
            await queue.submit(run.request("k1", "a", "b"))
            await run.commit(1)
            failed = await queue.wait(1, SOON_SECONDS)
            assert failed.state == "failed" and failed.version == 1
            assert failed.error is not None and "not published: engine-0" in failed.error
            assert queue.trouble is not None
            run.refuse = None
            await queue.submit(run.request("k2", "c", "d"))
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).state == "published"
            assert queue.trouble is None and run.published == [2]

    drive(work, tmp_path)


def test_c40_a_publication_that_failed_is_tried_again_by_the_next_process_and_then_said(
    tmp_path: Path,
) -> None:
    def is_published(queue: StepQueue) -> bool:
        return [it.state for it in queue.list()] == ["published"]

    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.refuse = "engine-0: gone"
            await queue.submit(run.request("k1", "a", "b"))
            await run.commit(1)
            assert (await queue.wait(1, SOON_SECONDS)).state == "failed"
        run.refuse = None
        for _ in range(2):  # and it is on disk
            async with Running(run.queue()) as queue:
                await wait_until_async(partial(is_published, queue), SOON_SECONDS)
                (step,) = queue.list()
                assert (step.error, step.publication, queue.trouble) == (None, {"version": 1}, None)
        assert run.published == [1]

    drive(work, tmp_path)


def test_a_disk_that_is_full_as_a_version_is_tried_again_ends_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.gateway.steps.queue.RETRY_SECONDS", 0.01)

    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.refuse = "engine-0: gone"
            await queue.submit(run.request("k1", "a", "b"))
            await run.commit(1)
            assert (await queue.wait(1, SOON_SECONDS)).state == "failed"
            run.full.set()
            await wait_until_async(lambda: "No space left" in str(queue.trouble), SOON_SECONDS)
            run.full.clear()
            run.refuse = None
            await wait_until_async(lambda: run.published == [1] and queue.trouble is None, SOON_SECONDS)

    drive(work, tmp_path)


@pytest.mark.parametrize("again", [False, True], ids=["in its process", "after a restart"])
def test_g18_what_was_trained_but_not_served_is_never_trained_again(tmp_path: Path, again: bool) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await queue.submit(run.request("k2", "c", "d"))
            await run.commit(1)
            await run.commit(2)  # given beside the publication that fails
            run.refuse = "engine-0: served and trained logprobs differ"
            run.engines.set()
            assert (await queue.wait(1, SOON_SECONDS)).state == "failed"
            assert (await queue.wait(2, SOON_SECONDS)).state == "failed"
        run.refuse = None
        async with Running(run.queue() if again else queue) as queue:
            members = [Member(rollout=name, reward=float(at)) for at, name in enumerate("abcd")]
            with pytest.raises(NothingToTrainError, match="4 already trained"):
                await queue.submit(StepRequest(key="k3", groups=[Group(id="g", members=members)]))
            # Of versions that were never served the age of a sample counts all the same.
            await queue.submit(run.request("k4", "e", "f", version=0))
            await run.commit(3)
            assert (await queue.wait(3, SOON_SECONDS)).state == "published"
            with pytest.raises(NothingToTrainError, match="2 stale"):
                await queue.submit(run.request("k5", "g", "h", version=0))
            assert run.published[-1] == 3 and 1 not in run.published

    drive(work, tmp_path)


def test_a_restore_is_a_step_without_samples(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            for number in (1, 2):
                await queue.submit(run.request(f"k{number}", f"a{number}", client_state={"at": number}))
                await run.commit(number)
                await queue.wait(number, SOON_SECONDS)
            with pytest.raises(UnknownCheckpointError):
                await queue.restore("step-000009", "back")
            first, again = [await queue.restore("step-000001", "back") for _ in range(2)]
            assert first.id == again.id == 3
            with pytest.raises(KeyReusedError):
                await queue.restore("step-000002", "back")
            await run.commit(3)
            assert (await queue.wait(3, SOON_SECONDS)).version == 3
            batch = read_batch(run.batch_folder(3))
            assert (batch.kind, batch.meta["from"]) == ("restore", "step-000001")
            assert queue.client_state == {"at": 1}  # the program goes back with the weights
            await queue.restore("step-000001", "on", client_state={"at": 3})
            await run.commit(4)
            await queue.wait(4, SOON_SECONDS)
            assert queue.client_state == {"at": 3}  # unless it says where it is

    drive(work, tmp_path)


def test_a_programs_state_has_a_bound(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        with pytest.raises(ClientStateTooLargeError, match="the maximum is 65536"):
            await queue.submit(run.request("k", "a", client_state={"text": "x" * 70_000}))
        assert (await queue.submit(run.request("k", "b", client_state={"text": "x" * 60_000}))).id == 1

    drive(work, tmp_path)


@pytest.mark.parametrize("lost", ["the folder", "an entry", "an outcome", "a bit"])
def test_c40_a_queue_that_is_lost_is_made_again_from_batches_and_checkpoints(
    tmp_path: Path, lost: str
) -> None:
    async def work(run: Run) -> None:
        requests = []
        async with Running(run.queue(max_lag=9)) as queue:
            for number in (1, 2, 3):
                requests.append(
                    run.request(f"k{number}", f"a{number}", f"b{number}", client_state={"at": number})
                )
                await queue.submit(requests[-1])
                if number == 2:
                    await wait_until_async(run.batch_folder(2).exists, SOON_SECONDS)
                    (run.batch_folder(2) / "failed.json").write_text('{"error": "out of memory"}')
                else:
                    await run.commit(number)
                await queue.wait(number, SOON_SECONDS)
            await queue.submit(run.request("k4", "a4", "b4"))
            await wait_until_async(run.batch_folder(4).exists, SOON_SECONDS)
            before = queue.list()[:3]
        entries = sorted((run.folder / "steps" / "queue").iterdir())
        if lost == "the folder":
            shutil.rmtree(entries[0].parent)
        elif lost == "a bit":
            for path in entries:
                path.write_bytes(b"\xff" + path.read_bytes()[1:])
        else:
            (
                run.folder / "steps" / "queue" / ("000001.json" if "entry" in lost else "000001.outcome.json")
            ).unlink()
        async with Running(run.queue(max_lag=9)) as queue:
            await run.commit(4)
            assert (await queue.wait(4, SOON_SECONDS)).state == "published"
            for old in before:
                again = (await queue.wait(old.id, SOON_SECONDS)).model_dump(exclude={"publication", "counts"})
                assert again == old.model_dump(exclude={"publication", "counts"})
            assert (await queue.submit(requests[0])).id == 1, "its key is known"
            with pytest.raises(KeyReusedError):
                await queue.submit(requests[2].model_copy(update={"client_state": None}))
            with pytest.raises(NothingToTrainError, match="2 already trained"):
                await queue.submit(StepRequest(key="k5", groups=requests[2].groups))
            assert (await queue.submit(StepRequest(key="k5", groups=requests[1].groups))).id == 5
        assert run.published[-1] == 4 and run.published.count(1) == 1

    drive(work, tmp_path)


def test_a_step_that_is_made_again_is_known_to_be_trained(tmp_path: Path) -> None:
    """Who waits for no more than that is answered at once."""
    found = StepFolder(tmp_path).read_all({1: {}, 2: {}, 3: {}})
    assert [step.state for step in found] == ["published", "published", "committed"]
    assert all(step.trained.is_set() for step in found) and not found[-1].ended.is_set()


def test_a_checkpoint_brought_from_elsewhere_is_a_step_whose_key_is_known(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k1", "a", "b", client_state={"at": 1})
            await queue.submit(request)
            await run.commit(1)
            done = await queue.wait(1, SOON_SECONDS)
        elsewhere = Run(run.folder / "elsewhere")
        shutil.copytree(run.folder / "checkpoints", elsewhere.folder / "checkpoints")
        async with Running(elsewhere.queue()) as queue:
            again = await queue.wait((await queue.submit(request)).id, SOON_SECONDS)
            assert again == done and elsewhere.published == [1]
            assert queue.client_state == {"at": 1}

    drive(work, tmp_path)


def test_a_rewound_run_tells_a_program_that_rewards_what_was_lost(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        rewound = {"to_step": 1, "time": 0.0, "client_state": {"at": 1}}
        await asyncio.to_thread((run.folder / "rewound.json").write_text, json.dumps(rewound))
        queue = run.queue()
        await run_one(run, queue)
        queue = run.queue()

        def step(key: str, *rollouts: str, reward: float | None = 1.0) -> StepRequest:
            members = [Member(rollout=rollout, reward=reward) for rollout in rollouts]
            return StepRequest(key=key, groups=[Group(id="g", members=members)])

        def by_ids(key: str, *conversations: list[str]) -> StepRequest:
            members = [Member(samples=ids, reward=1.0) for ids in conversations]
            return StepRequest(key=key, groups=[Group(id="g", members=members)])

        known = [sample for rollout in "abc" for sample in sampled(run.samples, rollout)]
        lost_ones = by_ids("k2", ["lost:0"]), by_ids("k2", known[2:], ["lost:0", "lost:1"])
        for late in (step("k2", "lost"), step("k2", "a", "lost"), *lost_ones):
            with pytest.raises(RewoundError, match="went back to step 1") as refused:
                await queue.submit(late)
            assert (refused.value.step, refused.value.client_state) == (1, {"at": 1})
        with pytest.raises(RewoundError):
            await queue.wait(2, 0)
        with pytest.raises(NothingToTrainError):  # no reward: nothing was lost with it
            await queue.submit(step("k2", "lost", reward=None))
        assert (await queue.submit(step("k2", "a"))).id == 2
        # The program has gone back: a rollout that never got an answer is no reason to send it back again.
        mixed = await queue.submit(step("k3", "b", "unanswered"))
        assert mixed.counts.dropped == {"no sample": 1}
        for late in (step("k4", "lost", "lost too"), by_ids("k4", ["lost:0"])):
            with pytest.raises(RewoundError):
                await queue.submit(late)
        part = await queue.submit(by_ids("k5", [*known[2:], "unanswered:0"], ["lost:0"]))
        assert (part.counts.trained, part.counts.dropped) == (1, {"no sample": 2})

    async def run_one(run: Run, queue: StepQueue) -> None:
        """The step the run went back to, committed and published."""
        async with Running(queue):
            run.samples = SampleStore(run.folder / "samples")
            state = {
                "counts": {},
                "metrics": {},
                "client_state": {"at": 1},
                "key": "k1",
                "request_sha256": "x",
            }
            await asyncio.to_thread(run.checkpoints.commit, 1, 1, state, write_weights)

    drive(work, tmp_path)


def test_a_disk_that_is_full_makes_steps_wait_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.gateway.steps.queue.DISK_SECONDS", 0.01)

    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k1", "a", "b")
            for instant in ("gateway.queued", "gateway.giving", "gateway.given", "gateway.ending"):
                monkeypatch.setattr(failpoints, "_ours", failpoints.Failpoints(f"{instant}:full"))
                if instant == "gateway.queued":
                    with pytest.raises(OSError, match="No space left"):
                        await queue.submit(request)
                    await queue.submit(request)
                elif instant == "gateway.ending":
                    await run.commit(1)
                    assert (await queue.wait(1, SOON_SECONDS)).state == "published"
            assert queue.queued == 0 and run.published == [1]

    drive(work, tmp_path)


def test_waiting_ends_with_the_wait_and_an_unknown_step_is_said(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        await queue.submit(run.request("k", "a"))
        waiting: StepStatus = await queue.wait(1, 0.01)
        assert waiting.state == "queued"
        with pytest.raises(UnknownStepError):
            await queue.wait(2, 0.01)

    drive(work, tmp_path)
