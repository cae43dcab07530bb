"""The queue of steps after a restart: whatever died in between, and whatever of it was lost."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from runtime.gateway.http.step_errors import (
    KeyReusedError,
    NothingToTrainError,
    RewoundError,
)
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.steps.step_records import StepFolder
from runtime.shared.batch import read_batch
from runtime.shared.json_files import write_json
from runtime.shared.schema import Group, Member, StepRequest, StepSettings
from runtime.shared.statuses import StepStatus
from tests.runtime.recorded import sampled
from tests.runtime.steps_run import SOON_SECONDS, Run, Running, drive, write_weights
from tests.support.waiting import wait_until_async


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


def test_what_the_trainer_has_is_said_to_train_after_a_restart_though_nothing_drives_it_yet(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        dying = run.queue()
        await dying.submit(run.request("k", "a", "b"))
        assert [it.state for it in run.queue().list()] == ["queued"]
        async with Running(dying):
            await wait_until_async(run.batch_folder(1).exists, SOON_SECONDS)
        assert [it.state for it in run.queue().list()] == ["training"]

    drive(work, tmp_path)


def test_c40_a_step_whose_entry_is_broken_before_the_trainer_had_it_fails_and_the_next_is_trained(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        await run.queue().submit(run.request("k", "a", "b"))
        (tmp_path / "steps" / "queue" / "000001.json").write_text("{")
        async with Running(run.queue()) as queue:
            done = await queue.wait(1, SOON_SECONDS)
            assert (done.state, done.version) == ("failed", None) and "cannot be read" in (done.error or "")
            await queue.submit(run.request("k2", "a", "b"))
            await wait_until_async(run.batch_folder(2).exists, SOON_SECONDS)
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).state == "published"

    drive(work, tmp_path)


@pytest.mark.parametrize("lost", [False, True], ids=["the queue is whole", "its entry is broken"])
def test_c40_of_two_committed_steps_the_one_under_publication_is_served_first_after_a_restart(
    tmp_path: Path, lost: bool
) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as dying:
            await run.commit_two(dying)
        if lost:
            (tmp_path / "steps" / "queue" / "000001.json").write_text("{")
        run.engines.set()
        async with Running(run.queue()) as queue:
            done = [await queue.wait(number, SOON_SECONDS) for number in (1, 2)]
            assert [it.state for it in done] == ["published"] * 2 and run.published == [1, 2]
            assert [it.publication for it in done] == [{"version": 1}, {"version": 2}]

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


def test_c40_a_publication_that_failed_is_tried_again_by_the_next_process_and_then_said(
    tmp_path: Path,
) -> None:
    def is_published(queue: StepQueue) -> bool:
        return [it.state for it in queue.list()] == ["published"]

    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            await run.fail_publication(queue)
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
            await run.fail_publication(queue)
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
            await run.commit_two(queue)
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
                    write_json(run.batch_folder(2) / "failed.json", {"error": "out of memory"})
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


async def brought_elsewhere(run: Run) -> tuple[StepRequest, StepStatus, Run]:
    """A step, how it ended, and another machine that has its checkpoint and nothing else."""
    async with Running(run.queue()) as queue:
        request = run.request("k1", "a", "b", client_state={"at": 1})
        await queue.submit(request)
        await run.commit(1)
        done = await queue.wait(1, SOON_SECONDS)
    elsewhere = Run(run.folder / "elsewhere")
    shutil.copytree(run.folder / "checkpoints", elsewhere.folder / "checkpoints")
    return request, done, elsewhere


def test_a_checkpoint_brought_from_elsewhere_is_a_step_whose_key_is_known(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        request, done, elsewhere = await brought_elsewhere(run)
        async with Running(elsewhere.queue()) as queue:
            again = await queue.wait((await queue.submit(request)).id, SOON_SECONDS)
            assert again == done and elsewhere.published == [1]
            assert queue.client_state == {"at": 1}

    drive(work, tmp_path)


def test_c40_a_checkpoint_brought_from_elsewhere_is_served_though_the_gateway_died_before_it_was(
    tmp_path: Path,
) -> None:
    """Its batch was lost with its machine: what is on disk of the step looks like one that waits."""

    async def work(run: Run) -> None:
        request, done, elsewhere = await brought_elsewhere(run)
        elsewhere.queue()  # it dies as its engines load
        async with Running(elsewhere.queue()) as queue:
            assert await queue.wait(1, SOON_SECONDS) == await queue.submit(request) == done
            assert elsewhere.published == [1] and queue.empty == 0

    drive(work, tmp_path)


def test_a_rewound_run_tells_a_program_that_rewards_what_was_lost(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        rewound = {"to_step": 1, "time": 0.0, "client_state": {"at": 1}}
        await asyncio.to_thread((run.folder / "rewound.json").write_text, json.dumps(rewound))
        queue = run.queue()
        await run_one(run, queue)
        queue = run.queue()

        def step(key: str, *rollouts: str, reward: float | None = 1.0) -> StepRequest:
            members = [
                Member(rollout=it, reward=reward and reward + place) for place, it in enumerate(rollouts)
            ]
            return StepRequest(key=key, groups=[Group(id="g", members=members)])

        def by_ids(key: str, *conversations: list[str]) -> StepRequest:
            members = [Member(samples=ids, reward=float(at)) for at, ids in enumerate(conversations)]
            return StepRequest(key=key, groups=[Group(id="g", members=members)])

        known = [sample for rollout in "abcdef" for sample in sampled(run.samples, rollout)]
        lost_ones = by_ids("k2", ["lost:0"]), by_ids("k2", known[2:], ["lost:0", "lost:1"])
        for late in (step("k2", "lost"), step("k2", "a", "lost"), *lost_ones):
            with pytest.raises(RewoundError, match="went back to step 1") as refused:
                await queue.submit(late)
            assert (refused.value.step, refused.value.client_state) == (1, {"at": 1})
        with pytest.raises(RewoundError):
            await queue.wait(2, 0)
        with pytest.raises(NothingToTrainError):  # no reward: nothing was lost with it
            await queue.submit(step("k2", "lost", reward=None))
        assert (await queue.submit(step("k2", "a", "b"))).id == 2
        # The program has gone back: a rollout that never got an answer is no reason to send it back again.
        mixed = await queue.submit(step("k3", "c", "d", "unanswered"))
        assert mixed.counts.dropped == {"no sample": 1}
        for late in (step("k4", "lost", "lost too"), by_ids("k4", ["lost:0"])):
            with pytest.raises(RewoundError):
                await queue.submit(late)
        part = await queue.submit(by_ids("k5", [known[4], "unanswered:0"], [known[5]], ["lost:0"]))
        assert (part.counts.trained, part.counts.dropped) == (2, {"no sample": 2})

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
