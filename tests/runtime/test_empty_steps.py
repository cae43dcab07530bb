"""C69: a step in which nothing can be learned takes no number and no version, and makes no sample stale."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.http.step_errors import KeyReusedError
from runtime.gateway.steps.empty_steps import FILE, EmptyStep, EmptySteps
from runtime.gateway.steps.step_records import Step, StepFolder, digest_of, request_payload
from runtime.shared.batch import read_batch
from runtime.shared.learnable import NO_VARIANCE
from runtime.shared.metrics import read_lines
from runtime.shared.schema import Group, Member, StepRequest, StepSettings
from runtime.shared.statuses import StepCounts
from runtime.shared.train_config import TrainConfig
from tests.runtime.recorded import answer, choice, record, sampled
from tests.runtime.recorded import asked as by
from tests.runtime.steps_run import SOON_SECONDS, Run, Running, drive, write_weights
from tests.support.waiting import wait_until_async

COUNTS = EmptyStep(StepCounts(samples=2, dropped={NO_VARIANCE: 2}), {"reward": 1.0})


def group(*rewards: float | None, name: str = "g") -> Group:
    """Its rollouts are `g0`, `g1`, …"""
    return Group(id=name, members=[Member(rollout=f"{name}{at}", reward=it) for at, it in enumerate(rewards)])


def step(run: Run, key: str, *groups: Group, version: int = 0, cut: bool = False, **more: Any) -> StepRequest:
    """A step whose every member has a fresh answer, a whole one unless it is `cut`."""
    for one in groups:
        for member in one.members:
            answered = choice([3, 4, 5], [-0.5] * 3) | {"finish_reason": "length" if cut else "stop"}
            record(run.samples, by(rollout=member.rollout), answer([1, 2], answered), version)
    return StepRequest(key=key, groups=list(groups), **more)


@pytest.mark.parametrize(
    ("rewards", "cut", "settings", "dropped"),
    [
        ((1.0, 1.0), False, {}, {NO_VARIANCE: 2}),
        ((1.0,), False, {}, {NO_VARIANCE: 1}),
        ((1.0, None), False, {}, {NO_VARIANCE: 1, "no reward": 1}),
        ((0.0, 1.0), True, {}, {"truncated": 2}),
        ((1.0, 1.0), False, {"loss": "dapo", "kl_beta": 0.1}, {NO_VARIANCE: 2}),
    ],
    ids=["equal rewards", "one member", "one reward", "cut off", "dapo with a KL term"],
)
def test_c69_a_step_that_teaches_nothing_takes_no_number_and_keeps_its_answer(
    tmp_path: Path, rewards: tuple[float | None, ...], cut: bool, settings: Any, dropped: dict[str, int]
) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            asked = step(run, "k", group(*rewards), cut=cut, settings=StepSettings(**settings))
            empty = await queue.submit(asked)
            assert (empty.id, empty.state, empty.version) == (0, "empty", None)
            assert empty.counts.dropped == dropped and empty.counts.trained == 0
            assert sum(dropped.values()) == empty.counts.samples == len(rewards)
            assert empty.error is not None and all(it in empty.error for it in dropped)
            assert (queue.list(), queue.queued, queue.empty) == ([], 0, 1)
            assert not any(queue.has(it.id) for it in run.samples.of_rollout("g0"))
            with pytest.raises(KeyReusedError, match="an empty step"):
                await queue.submit(asked.model_copy(update={"client_state": {"at": 1}}))
        again = run.queue(train=TrainConfig(overlong="keep", kl_beta=0.1))  # resumed with other settings
        assert await again.submit(asked) == empty and again.empty == 1

    drive(work, tmp_path)


@pytest.mark.parametrize(
    ("rewards", "cut", "settings"),
    [
        ((0.0, 1.0), False, {}),
        ((0.0, 1.0), True, {"overlong": "keep"}),
        ((1.0, 1.0), False, {"kl_beta": 0.1}),
    ],
    ids=["rewards that differ", "cut off and kept", "a KL term"],
)
def test_c69_a_step_that_teaches_something_is_taken(
    tmp_path: Path, rewards: tuple[float, ...], cut: bool, settings: Any
) -> None:
    async def work(run: Run) -> None:
        queue = run.queue(train=TrainConfig(**settings))
        flat = group(1.0, 1.0, name="flat") if not settings else group(*rewards, name="flat")
        taken = await queue.submit(step(run, "k", flat, group(*rewards), cut=cut))
        assert (taken.id, taken.state, queue.empty) == (1, "queued", 0)

    drive(work, tmp_path)


def test_c69_of_a_step_that_teaches_something_one_such_group_is_read_before_it_has_its_number(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        queue, read = run.queue(), []
        load = run.samples.load
        run.samples.load = lambda ref: read.append(ref.tags.rollout) or load(ref)  # type: ignore[method-assign]
        groups = [group(1.0, 1.0, name="flat"), *(group(0.0, 1.0, name=name) for name in ("one", "two"))]
        assert (await queue.submit(step(run, "k", *groups))).id == 1
        assert read == ["flat0", "flat1", "one0", "one1"]

    drive(work, tmp_path)


def test_c69_an_empty_step_makes_nothing_stale_and_the_next_one_counts_it(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue(max_lag=0)) as queue:
            fresh = step(run, "k1", group(0.0, 1.0, name="fresh"))
            for number in range(3):
                empty = step(run, f"empty {number}", group(1.0, 1.0, name=f"flat{number}"))
                assert (await queue.submit(empty)).state == "empty"
                assert (await queue.submit(empty)).state == "empty"  # sent again: counted once
            assert (await queue.submit(fresh)).id == 1
            await run.commit(1)
            done = await queue.wait(1, SOON_SECONDS)
            assert (done.state, done.version, done.counts.trained) == ("published", 1, 2)
            assert read_batch(run.batch_folder(1)).meta["empty"] == {"steps": 3, "samples": 6}
            assert run.published == [1] and queue.empty == 3
            await queue.submit(step(run, "k2", group(0.0, 1.0, name="next"), version=1))
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).version == 2
            assert read_batch(run.batch_folder(2)).meta["empty"] == {"steps": 0, "samples": 0}

    drive(work, tmp_path)


def test_c69_a_step_that_is_emptied_while_it_waits_has_no_version_and_keeps_its_answer(
    tmp_path: Path,
) -> None:
    """Of its group the stale member leaves, and the others have earned the same."""

    async def work(run: Run) -> None:
        async with Running(run.queue(max_lag=0)) as queue:
            await queue.submit(step(run, "k1", group(0.0, 1.0, name="first")))
            second = group(0.0, 1.0, 1.0, name="second")
            sampled(run.samples, "second0", 0)
            for late in ("second1", "second2"):
                sampled(run.samples, late, 1)  # of the version that step 1 is about to make
            asked = StepRequest(key="k2", groups=[second])
            assert (await queue.submit(asked)).id == 2
            await run.commit(1)
            empty = await queue.wait(2, SOON_SECONDS)
            assert (empty.state, empty.version) == ("empty", None)
            assert empty.counts.dropped == {"stale": 1, NO_VARIANCE: 2} and empty.metrics["reward"] == 1
            assert await queue.submit(asked) == empty and queue.empty == 1
            free = await queue.submit(step(run, "k3", group(0.0, 1.0, name="third"), version=1))
            await run.commit(free.id)
            assert (await queue.wait(free.id, SOON_SECONDS)).state == "published"
            assert read_batch(run.batch_folder(free.id)).meta["empty"] == {"steps": 1, "samples": 3}
        again = run.queue()
        assert (await again.submit(asked), again.empty) == (empty, 1)

    drive(work, tmp_path)


@pytest.mark.parametrize("lost", ["its outcome", "its withdrawal as well"])
def test_c69_a_step_that_was_emptied_as_the_gateway_died_is_empty_for_the_next_one(
    tmp_path: Path, lost: str
) -> None:
    """By its number as by its key, whatever was answered since."""

    async def work(run: Run) -> None:
        second = group(0.0, 1.0, name="second")
        async with Running(run.queue(max_lag=0)) as queue:
            await queue.submit(step(run, "k1", group(0.0, 1.0, name="first")))
            asked = step(run, "k2", second)
            await queue.submit(asked)
            await run.commit(1)
            empty = await queue.wait(2, SOON_SECONDS)
            assert empty.state == "empty"
        (tmp_path / "steps" / "queue" / "000002.outcome.json").unlink()
        if lost != "its outcome":
            shutil.rmtree(run.batch_folder(2))
        async with Running(run.queue(max_lag=0)) as queue:
            step(run, "late", second, version=1)
            assert await queue.wait(2, SOON_SECONDS) == await queue.submit(asked) == empty
            assert [it.name for it in run.batch_folder(2).iterdir()] == ["failed.json"]

    drive(work, tmp_path)


def test_c69_an_empty_step_that_the_disk_did_not_take_is_answered_when_it_is_sent_again(
    tmp_path: Path,
) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        asked = step(run, "k", group(1.0, 1.0))
        (tmp_path / FILE).mkdir()  # in its way
        with pytest.raises(OSError, match=FILE):
            await queue.submit(asked)
        (tmp_path / FILE).rmdir()
        assert queue.disk is not None and queue.empty == 0
        assert (await queue.submit(asked)).state == "empty"
        assert queue.disk is None and len(read_lines(tmp_path / FILE)) == 1

    drive(work, tmp_path)


def test_empty_steps_after_a_lost_machines_last_step_are_lost_with_it(tmp_path: Path) -> None:
    before = EmptySteps(tmp_path, 9)
    for after in (1, 3):
        before.add(f"k{after}", "digest", COUNTS, after, None)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "torn')
    assert len(EmptySteps(tmp_path, 3)) == 2 and len(EmptySteps(tmp_path, 2)) == 1
    later = EmptySteps(tmp_path, 9)  # the numbers are used again: what was lost does not come back
    later.add("k4", "digest", COUNTS, 2, None)
    assert [json.loads(line)["key"] for line in (tmp_path / FILE).read_text().splitlines()] == ["k1", "k4"]
    assert later.between(1, 3) == {"steps": 2, "samples": 4} and later.between(2, 3)["steps"] == 1


def test_c69_two_who_send_one_empty_step_at_once_have_one_answer(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        queue = run.queue()
        asked = step(run, "k", group(1.0, 1.0), group(math.inf, 0.5, name="h"))
        answers = await asyncio.gather(*(queue.submit(asked) for _ in range(4)))
        assert [it.state for it in answers] == ["empty"] * 4 and queue.empty == 1
        assert answers[0].counts.dropped == {NO_VARIANCE: 3, "reward not finite": 1}
        assert len(read_lines(tmp_path / FILE)) == 1

    drive(work, tmp_path)


def test_an_empty_step_that_an_older_gateway_took_in_or_trained_is_read_as_it_is(tmp_path: Path) -> None:
    """Older ones gave such a step a number, and the trainer a version of the weights before."""

    async def work(run: Run) -> None:
        run.queue()
        first, second = (step(run, f"k{at}", group(1.0, 1.0, name=f"old{at}")) for at in (1, 2))
        folder = StepFolder(tmp_path / "steps")
        counts = StepCounts(samples=2, dropped={NO_VARIANCE: 2})
        for number, asked in ((1, first), (2, second)):
            payload = digest_of(request_payload(asked))
            taken = Step(number, asked.key, payload, "train", list(asked.groups), counts=counts)
            folder.queue(taken)
            if number == 1:
                run.checkpoints.commit(1, 1, {"counts": counts.model_dump(), "key": "k1"}, write_weights)
                taken.state, taken.committed = "published", True
                folder.write_outcome(taken)
        async with Running(run.queue()) as queue:
            done = await queue.submit(first)
            assert (done.id, done.state, done.version) == (1, "published", 1)
            assert done.counts.dropped == {NO_VARIANCE: 2}
            waited = await queue.wait(2, SOON_SECONDS)
            assert (waited.id, waited.state, waited.version) == (2, "empty", None)
            assert (await queue.submit(step(run, "k3", group(0.0, 1.0, name="new"), version=1))).id == 3

    drive(work, tmp_path)


def test_c69_the_programs_place_goes_on_with_empty_steps_until_one_is_committed(tmp_path: Path) -> None:
    """As `--resume` needs it: what was rolled out for nothing is not rolled out again."""

    async def work(run: Run) -> None:
        def at(place: int, *rewards: float, **more: Any) -> StepRequest:
            made = group(*rewards, name=f"g{place}")
            return step(run, f"k{place}", made, client_state={"at": place}, **more)

        async with Running(run.queue()) as queue:
            run.engines.clear()
            await queue.submit(at(1, 0.0, 1.0))
            await queue.submit(at(2, 1.0, 1.0))
            assert queue.client_state is None, "step 1 is not committed: its place comes first"
            await run.commit(1)
            run.engines.set()
            assert (await queue.wait(1, SOON_SECONDS)).state == "published"
            assert queue.client_state == {"at": 2} and queue.last_metrics["trained_tokens"] == 0
            await queue.submit(step(run, "no place", group(1.0, 1.0, name="h")))
            assert queue.client_state == {"at": 2}
        async with Running(run.queue()) as queue:  # after a restart
            await wait_until_async(lambda: queue.client_state == {"at": 2}, SOON_SECONDS)
            await queue.submit(at(3, 0.0, 1.0, version=1))
            await run.commit(2)
            assert (await queue.wait(2, SOON_SECONDS)).state == "published"
            assert queue.client_state == {"at": 3} and queue.last_metrics == {"loss": 0.5}

    drive(work, tmp_path)


def test_c69_an_empty_step_that_is_behind_open_ones_hides_no_place_before_it(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        async with Running(run.queue()) as queue:
            for place, rewards in enumerate([(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)], start=1):
                made = group(*rewards, name=f"g{place}")
                await queue.submit(step(run, f"k{place}", made, client_state={"at": place}))
                assert queue.client_state == {"at": 1}, "what is behind step 1 waits for it"
            await run.commit(1)
            await queue.wait(1, SOON_SECONDS)
            assert queue.client_state == {"at": 3}

    drive(work, tmp_path)
