"""Groups rolled out ahead of the training: what is begun, and what leaves with which step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.client import (
    Session,
    TrainingFailed,
    Trajectory,
    TrajectoryGroup,
    gather_ahead,
    gather_trajectory_groups,
    limit_concurrency,
)
from tests.support.played_groups import (
    E,
    K,
    Played,
    ahead,
    answered,
    next_of,
    played_out,
    releasing,
    turns,
)
from tests.support.small_run import SmallRun

# ------------------------------------------------------------------ what is begun, and what leaves


def test_c59_at_staleness_0_the_order_of_all_calls_is_that_of_a_loop_that_gathers_and_trains(
    session: Session,
) -> None:
    def loop(is_ahead: bool) -> list[Any]:
        calls: list[Any] = []

        async def rollout(number: int, member: int) -> Trajectory:
            calls.append(("begun", number, member))
            for _ in range(7 * member + 3 * (number % 2)):
                await asyncio.sleep(0)
            calls.append(("ended", number, member))
            return answered(0, float(member))

        def given() -> Iterator[Any]:
            for number in range(6):
                calls.append(("made", number))
                yield TrajectoryGroup(rollout(number, member) for member in range(K))

        def judge(group: TrajectoryGroup) -> TrajectoryGroup | None:
            calls.append(("judged", group.trajectories[1].reward))
            return group if len(calls) % 5 else None

        async def train(groups: list[TrajectoryGroup]) -> None:
            calls.append(("trained", [[it.reward for it in group] for group in groups]))

        async def work() -> None:
            if is_ahead:
                async for groups in gather_ahead(session, given(), per_step=E, after_each=judge):
                    await train(groups)
                return
            all_of_them = given()
            for _ in range(3):
                of_a_step = (next(all_of_them) for _ in range(E))
                await train(await gather_trajectory_groups(of_a_step, after_each=judge))

        asyncio.run(work())
        return calls

    assert loop(is_ahead=True) == loop(is_ahead=False)


@pytest.mark.process
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_c39_so_many_groups_are_begun_as_there_may_be_steps_ahead_and_no_more(
    session: Session, staleness: int
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, staleness=staleness) as steps:
            step = next_of(steps)
            first = E * (1 + staleness)
            await played.has_begun(*range(first))
            await played.finish(0, 1)
            assert (await step).numbers == [0, 1]
            await played.has_begun(*range(first))  # while the program trains these go on, and no others
            step = next_of(steps)
            await played.has_begun(*range(first + E))
            await played.finish(2, 3)
            assert (await step).numbers == [2, 3]

    played_out(work())


@pytest.mark.process
def test_c39_a_step_leaves_as_its_number_is_complete_and_a_late_one_is_the_first_of_a_later_step(
    session: Session,
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played) as steps:
            step = next_of(steps)
            await played.finish(2, 1)
            taken = await step
            assert taken.numbers == [1, 2] == [it.metadata["n"] for it in taken]
            step = next_of(steps)
            await played.finish(4, 3, 0)
            assert (await step).numbers == [0, 3], "the oldest first"
            assert not played.cancelled

    played_out(work())


@pytest.mark.process
def test_c39_a_late_one_that_would_be_too_old_is_cancelled_and_replaced_and_holds_nobody(
    run: SmallRun, session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        played = Played(session)
        played.hold[0] = asyncio.get_running_loop().create_future()
        async with ahead(played) as steps, releasing(played.hold[0]):
            for version, numbers in ((0, (1, 2)), (1, (3, 4))):
                run.version = version
                step = next_of(steps)
                await played.finish(*numbers, version=version)
                assert ((await step).numbers, (await step).stale) == ([*numbers], [])
            run.version = 2
            step = next_of(steps)
            await played.has_begun(*range(9))  # four steps' worth, and one in the place of the late one
            await played.finish(5, 6, version=2)
            taken = await step
            assert (taken.numbers, taken.stale, played.cancelled) == ([5, 6], [0], []), "it is still ending"
            assert taken.place == {"steps": 3, "next": 7, "again": []}
        assert sorted(played.cancelled) == [0, 7, 8]

    played_out(work())
    said = capfd.readouterr().err
    assert "step 3: 1 group left out as too old for staleness=1; others are rolled out instead" in said
    assert "3 groups begun and in no step (1 as too old): 0 trajectories had come" in said


@pytest.mark.process
def test_c39_age_is_by_the_answers_and_what_was_asked_of_an_older_version_by_name_is_not_old(
    run: SmallRun, session: Session
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, staleness=2) as steps:
            step = next_of(steps)
            await played.finish(4, version=1)  # it began before version 1, and asked later
            await played.finish(0, 1, 2, 3, 5, version=0)
            assert (await step).lags == {1: 2 * K}, "a version that has answered is the newest"
            run.version = 1
            step = next_of(steps)
            await played.finish(6, version=0)  # an opponent's: the policy was never so old in it
            assert (await step).numbers == [2, 3]
            run.version = 3
            taken = await next_of(steps)
            assert (taken.numbers, taken.stale, taken.lags) == ([4, 6], [5], {2: K})

    played_out(work())


@pytest.mark.process
def test_what_is_trained_while_a_step_is_waited_for_makes_older_too(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played) as steps:
            step = next_of(steps)
            await played.finish(0, version=0)
            await played.finish(1, version=2)
            await played.finish(4, version=2)
            taken = await step
            assert (taken.numbers, taken.stale) == ([1, 4], [0, 2, 3]), "an answer told of a newer version"
            assert len(played.begun) == 4 + 3, "what begins then is not old"

    played_out(work())


@pytest.mark.process
def test_c39_a_run_that_leaves_out_what_is_so_old_is_said(run: SmallRun, session: Session) -> None:
    run.max_staleness = 2

    async def work(staleness: int) -> None:
        async with ahead(Played(session), [], staleness=staleness) as steps:
            assert [it async for it in steps] == []

    played_out(work(2))
    with pytest.raises(TrainingFailed, match="staleness=3"):
        played_out(work(3))
    for wrong in (-1, 1.5, "1", True, None):
        with pytest.raises(ValueError, match="staleness"):
            played_out(work(wrong))  # as a program without types has it


@pytest.mark.process
def test_a_bound_on_rollouts_at_once_holds_over_the_steps(session: Session) -> None:
    at_once: set[int] = set()
    most: list[int] = []

    @limit_concurrency(3)
    async def rollout(number: int) -> Trajectory:
        at_once.add(number)
        most.append(len(at_once))
        for _ in range(1 + number % 3):
            await asyncio.sleep(0)
        at_once.discard(number)
        return answered(0, float(number))

    async def work() -> None:
        groups = (TrajectoryGroup(rollout(K * one + it) for it in range(K)) for one in range(12))
        async with ahead(Played(session), groups, staleness=2) as steps:
            taken = [it.numbers async for it in steps]
        assert sorted(number for numbers in taken for number in numbers) == [*range(12)]

    played_out(work())
    assert max(most) == 3


@pytest.mark.process
def test_given_groups_may_be_called_for_and_the_last_step_has_what_is_left(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        groups = [lambda number=number: played.group(number) for number in range(3)]
        async with ahead(played, groups) as steps:
            step = next_of(steps)
            await played.finish(0, 2)
            assert (await step).numbers == [0, 2]
            step = next_of(steps)
            await turns()
            assert not step.done()
            await played.finish(1)
            assert (await step).numbers == [1]
            with pytest.raises(StopAsyncIteration):
                await anext(steps)

    played_out(work())


@pytest.mark.process
def test_nothing_is_begun_that_no_step_would_have(
    session: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, steps=2, staleness=2) as steps:
            step = next_of(steps)
            await played.has_begun(0, 1, 2, 3)
            await played.finish(0, 1, 2, 3)
            assert (await step).numbers == [0, 1]
            assert [it.numbers async for it in steps] == [[2, 3]]

    played_out(work())
    assert "in no step" not in capfd.readouterr().err


# ------------------------------------------------------------------ groups without variance


@pytest.mark.process
def test_a_group_without_variance_is_rolled_out_again_at_once_up_to_a_bound_and_goes_along(
    session: Session,
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, dynamic_sampling=2 * K) as steps:
            step = next_of(steps)
            await played.finish(0, rewards=(1.0, 1.0))
            await played.has_begun(0, 1, 2, 3, 4)
            await played.finish(1, 2)
            taken = await step
            assert (taken.numbers, taken.again) == ([0, 1, 2], [0]), "it is counted where it is trained"
            await played.finish(3, 4, rewards=(0.5, 0.5))  # while the program trains
            await played.has_begun(*range(7))
            step = next_of(steps)
            await played.has_begun(*range(9))
            await played.finish(5, rewards=(0.0, 0.0))
            await turns()
            assert len(played.begun) == 9, "two groups more in a step, and no third"
            await played.finish(6)
            taken = await step
            assert (taken.numbers, taken.again) == ([3, 4, 5, 6], [3, 4])

    played_out(work())


@pytest.mark.process
@pytest.mark.parametrize(("rewards", "again"), [((None, None), 0), ((1.0, None), 1), ((0.0, 1.0), 0)])
def test_of_a_group_without_rewards_it_cannot_be_said_that_it_has_no_variance(
    session: Session, rewards: Any, again: int
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, staleness=0, dynamic_sampling=True) as steps:
            step = next_of(steps)
            await played.finish(0, rewards=rewards)
            await turns()
            assert len(played.begun) == E + again
            await played.finish(*range(1, E + again))
            assert (await step).again == [0] * again

    played_out(work())
