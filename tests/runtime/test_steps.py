"""The queue of steps: what it takes in, once per key, and what becomes of it in its turn."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from runtime.gateway.http.step_errors import (
    ClientStateTooLargeError,
    KeyReusedError,
    NothingToTrainError,
    QueueFullError,
    SettingsRefusedError,
    UnknownCheckpointError,
    UnknownStepError,
)
from runtime.gateway.steps.rollout_log import FOLDER, RolloutLog
from runtime.gateway.steps.sample_ownership import SampleOwnership
from runtime.gateway.steps.step_records import Step, StepFolder
from runtime.gateway.steps.step_registry import MAX_QUEUED
from runtime.shared import failpoints
from runtime.shared.batch import read_batch
from runtime.shared.json_files import write_json
from runtime.shared.schema import Group, Member, StepRequest, StepSettings
from runtime.shared.statuses import StepStatus
from runtime.shared.train_config import TrainConfig
from tests.runtime.recorded import sampled
from tests.runtime.steps_run import SOON_SECONDS, Run, Running, drive
from tests.support.waiting import wait_until_async


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
            await run.commit_two(queue)
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
        async with Running(run.queue(rollout_log=RolloutLog(tmp_path, lambda: str))) as queue:
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
        members = [Member(rollout="c", reward=1.0)]
        if is_there:
            sampled(run.samples, "other")
            members.append(Member(rollout="other", reward=0.0))
        again = StepRequest(key="k3", groups=[Group(id="g", members=members)])
        for later in (queue, run.queue()):  # the same process of the gateway, and the next one
            if not is_there:
                with pytest.raises(NothingToTrainError, match="2 already trained"):
                    await later.submit(again)
            else:
                assert (await later.submit(again)).counts.trained == 2

    drive(work, tmp_path)


def test_c39_a_step_of_which_nothing_is_left_beside_a_publication_is_empty_in_its_turn(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue(max_lag=0, rollout_log=RolloutLog(tmp_path, lambda: str))) as queue:
            run.engines.clear()
            await queue.submit(run.request("k1", "a", "b"))
            await queue.submit(run.request("k2", "c", "d"))
            await queue.submit(run.request("k3", "e", "f", version=1))
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS, committed=True)
            run.engines.set()
            await run.commit(3)
            first, none, last = [await queue.wait(number, SOON_SECONDS) for number in (1, 2, 3)]
            assert (first.state, none.state, last.state) == ("published", "empty", "published")
            assert none.counts.dropped == {"stale": 2} and none.version is None and none.counts.trained == 0
            assert [it.name for it in sorted((tmp_path / FOLDER).iterdir())] == [
                "empty-000001-01.jsonl",
                "step-000001.jsonl",
                "step-000003.jsonl",
            ]
            assert not queue.has(run.samples.of_rollout("c")[0].id)

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
    ownership = SampleOwnership(folder, max_staleness=2)
    step = Step(1, "k", "digest", "train", samples=["a"])
    ownership.remember(step)
    with monkeypatch.context() as disk:
        disk.setattr(folder, "queue", full)
        with pytest.raises(OSError, match="no space"):
            ownership.add(step, ["a", "b"])
        assert not ownership.is_owned("b")
    ownership.add(step, ["a", "b"])
    assert (step.samples, ownership.is_owned("b")) == (["a", "b"], True)


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
        assert (await queue.submit(run.request("k", "a", "b"))).state == "queued"  # the key is still free

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
            assert third.state == "empty" and third.counts.dropped == {"stale": 2}
            assert json.loads((run.batch_folder(3) / "failed.json").read_text())["error"] == third.error
            await queue.submit(run.request("k4", "g", "h", version=2))
            await run.commit(4)
            assert (await queue.wait(4, SOON_SECONDS)).version == 4
            # What was empty has made no answer older.
            lags = [
                json.loads((run.batch_folder(step) / "batch.json").read_text())["lags"] for step in (2, 4)
            ]
            assert lags == [{"0": 1}, {"2": 0}]

    drive(work, tmp_path)


def test_c45_a_full_queue_refuses_and_loses_nothing(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue(max_lag=MAX_QUEUED)
        for number in range(MAX_QUEUED):
            await queue.submit(run.request(f"k{number}", f"r{number}", f"s{number}"))
        with pytest.raises(QueueFullError):
            await queue.submit(run.request("one more", "x", "y"))
        assert (await queue.submit(run.request("k0", "r0", "s0"))).id == 1  # known: not one more
        async with Running(queue):
            for number in range(MAX_QUEUED):
                await run.commit(number + 1)
            assert (await queue.wait(MAX_QUEUED, SOON_SECONDS)).state == "published"

    drive(work, tmp_path)


def test_a_step_the_trainer_cannot_do_fails_with_its_words_and_gives_its_samples_back(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k1", "a", "b")
            await queue.submit(request)
            await wait_until_async(run.batch_folder(1).exists, SOON_SECONDS)
            write_json(run.batch_folder(1) / "failed.json", {"error": "out of memory"})
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


def test_a_restore_is_a_step_without_samples(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            for number in (1, 2):
                await queue.submit(
                    run.request(f"k{number}", f"a{number}", f"b{number}", client_state={"at": number})
                )
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
        assert (await queue.submit(run.request("k", "b", "c", client_state={"text": "x" * 60_000}))).id == 1

    drive(work, tmp_path)


def test_a_disk_that_is_full_makes_steps_wait_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.gateway.steps.queue.DISK_SECONDS", 0.01)
    instants = [f"gateway.{it}" for it in ("queued", "giving", "given", "ending")]
    full = failpoints.Failpoints(",".join(f"{it}:full" for it in instants))  # at the first passing of each
    monkeypatch.setattr(failpoints, "_ours", full)

    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            request = run.request("k1", "a", "b")
            with pytest.raises(OSError, match="No space left"):
                await queue.submit(request)
            assert queue.disk is not None and "No space left" in queue.disk
            await queue.submit(request)
            assert queue.disk is None
            await run.commit(1)
            assert (await queue.wait(1, SOON_SECONDS)).state == "published"
            assert queue.queued == 0 and run.published == [1]
            assert [full._passed[it] for it in instants] == [2, 3, 2, 2]

    drive(work, tmp_path)


def test_waiting_ends_with_the_wait_and_an_unknown_step_is_said(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        await queue.submit(run.request("k", "a", "b"))
        waiting: StepStatus = await queue.wait(1, 0.01)
        assert waiting.state == "queued"
        with pytest.raises(UnknownStepError):
            await queue.wait(2, 0.01)

    drive(work, tmp_path)
