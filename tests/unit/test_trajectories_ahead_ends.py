"""Groups rolled out ahead of the training: how a loop over them ends, and where another life goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.client import (
    Rewound,
    Session,
    Trajectory,
    TrajectoryGroup,
    gather_ahead,
)
from launcher.client.trajectories.ahead import StepGroups
from tests.support.played_groups import (
    E,
    K,
    Played,
    ahead,
    answered,
    next_of,
    played_out,
    turns,
)
from tests.support.small_run import SmallRun

# ------------------------------------------------------------------ exceptions, and the end


@pytest.mark.process
def test_exceptions_are_data_up_to_so_many_of_what_is_in_no_step_and_leave_with_it(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, max_exceptions=1) as steps:
            for numbers in ((0, 1), (2, 3)):
                step = next_of(steps)
                await played.until(lambda number=numbers[1]: (number + E, K - 1) in played.ends)
                played.ends[numbers[0], 0].set_exception(ValueError("a tool"))
                played.ends[numbers[0], 1].set_result(answered(0, 1.0))
                await played.finish(numbers[1])
                assert [(len(it), len(it.exceptions)) for it in await step] == [(1, 1), (2, 0)]
            for member in range(K):
                played.ends[4, member].set_exception(KeyError("two"))
            await turns()  # while the program trains
            with pytest.raises(KeyError):
                await anext(steps)
            assert played.cancelled == [5], "none is left under way"

    played_out(work())


@pytest.mark.process
def test_what_the_given_groups_raise_is_raised_where_a_step_is_taken(session: Session) -> None:
    async def work() -> None:
        played = Played(session)

        def given() -> Iterator[Any]:
            yield from played.given(4)
            raise LookupError("no more data")

        async with ahead(played, given(), dynamic_sampling=True) as steps:
            step = next_of(steps)
            await played.finish(0, rewards=(1.0, 1.0))
            with pytest.raises(LookupError):
                await step

    played_out(work())


@pytest.mark.process
@pytest.mark.parametrize("how", ["break", "exception", "Ctrl-C", "cancelled"])
@pytest.mark.parametrize("is_closing", [True, False])
def test_closed_early_every_rollout_is_cancelled_and_none_is_left(
    session: Session, how: str, is_closing: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    played: list[Played] = []

    async def leave() -> None:
        if how == "Ctrl-C":
            asyncio.get_running_loop().call_soon(_interrupt)
            await asyncio.Event().wait()
        if how == "cancelled":
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(0)
        if how == "exception":
            raise LookupError("in the loop's body")

    async def finish() -> None:
        await played[0].finish(0, 1)
        await played[0].until(lambda: 3 in played[0].begun)

    async def work() -> None:
        played.append(Played(session))
        finishing = asyncio.create_task(finish())
        steps = gather_ahead(session, played[0].given(9), per_step=E, staleness=1, pbar_desc=None)
        if is_closing:
            async with contextlib.aclosing(steps):
                async for _ in steps:
                    await leave()
                    break
            assert played[0].cancelled == [2, 3], "by now"
            return
        async for _ in steps:
            await finishing
            await leave()
            break

    ends = {"exception": LookupError, "Ctrl-C": KeyboardInterrupt, "cancelled": asyncio.CancelledError}
    with pytest.raises(ends[how]) if how in ends else contextlib.nullcontext():
        played_out(work())
    assert sorted(played[0].cancelled) == [2, 3]
    assert "2 groups begun and in no step: 0 trajectories had come" in capfd.readouterr().err


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.process
def test_of_a_list_what_is_in_no_step_is_not_said_to_be_never_awaited(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, [*played.given(9)], steps=1) as steps:
            step = next_of(steps)
            await played.finish(0, 1)
            assert [(await step).numbers] + [it.numbers async for it in steps] == [[0, 1]]

    played_out(work())


@pytest.mark.process
def test_what_is_no_place_is_said(session: Session) -> None:
    async def work() -> None:
        async with ahead(Played(session), [], place={"place": {"steps": 1}}) as steps:
            await anext(steps)

    with pytest.raises(ValueError, match=r"groups\.place.*\['place'\]"):
        played_out(work())


@pytest.mark.process
def test_a_group_that_is_closed_before_it_began_is_not_said_to_be_never_awaited(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played) as steps:
            step = next_of(steps)
            await played.until(lambda: 0 in played.begun)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
        later = Played(session)
        given = later.given(9)
        for place in ({"steps": 1, "next": 5, "again": [2]},):
            async with ahead(later, given, place=place) as steps:
                step = next_of(steps)
                await later.has_begun(2, 5, 6, 7)
                await later.finish(2, 5)
                assert (await step).place == {"steps": 2, "next": 6, "again": []}

    played_out(work())


# ------------------------------------------------------------------ another life, another machine


@pytest.mark.process
def test_b13_a_life_that_goes_on_from_its_place_takes_each_group_once_but_for_what_was_too_old(
    run: SmallRun, session: Session
) -> None:
    async def life(place: Any, orders: list[tuple[int, ...]]) -> tuple[list[StepGroups], list[int]]:
        played = Played(session)
        found = []
        async with ahead(played, place=place, staleness=2) as steps:
            for numbers in orders:
                step = next_of(steps)
                await played.finish(*numbers)
                found.append(await step)
        return found, played.begun

    first, _ = played_out(life(None, [(1, 0), (4, 2), (5, 6)]))
    assert [it.numbers for it in first] == [[0, 1], [2, 4], [5, 6]]
    places = [it.place for it in first]
    assert places == [
        {"steps": 1, "next": 2, "again": []},
        {"steps": 2, "next": 5, "again": [3]},
        {"steps": 3, "next": 7, "again": [3]},
    ]
    second, begun = played_out(life(places[-1], [(3, 9), (7, 10)]))
    assert begun[:6] == [3, 7, 8, 9, 10, 11]
    assert [it.numbers for it in second] == [[3, 9], [7, 10]]
    assert second[0].place == {"steps": 4, "next": 10, "again": [7, 8]}
    third, begun = played_out(life(second[0].place, [(7, 8)]))
    assert begun[:3] == [7, 8, 10], "of a life that ended before its last step was kept"
    taken = [number for it in [*first, second[0], *third] for number in it.numbers]
    assert sorted(taken) == [*range(10)]


@pytest.mark.process
def test_b13_what_began_on_a_lost_machine_is_in_no_step_and_the_program_is_sent_back(
    run: SmallRun, session: Session
) -> None:
    def named(number: int) -> TrajectoryGroup:
        return TrajectoryGroup([Trajectory(rollout=f"{number}-{it}", reward=float(it)) for it in range(K)])

    async def work() -> None:
        played = Played(session)
        async with ahead(played) as steps:
            step = next_of(steps)
            await played.finish(0, 1)
            await session.train_async([named(0)], state={"place": (await step).place})
            step = next_of(steps)
            await played.finish(2, 3)
            taken = await step
            run.lose_machine(1)
            run.lost = {"1-0"}
            with pytest.raises(Rewound):
                await session.train_async([named(1)], state={"place": taken.place})
            with pytest.raises(Rewound, match="a step was refused"):
                await anext(steps)
        assert played.cancelled == [4, 5]
        again = Played(session)
        place = session.read_state()["place"]
        async with ahead(again, place=place) as steps:
            step = next_of(steps)
            await again.has_begun(2, 3, 4, 5)
            await again.finish(3, 2)
            assert (await step).numbers == [2, 3]

    played_out(work())


@pytest.mark.process
def test_b13_an_older_version_than_was_served_means_that_the_machine_was_lost(
    run: SmallRun, session: Session
) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played) as steps:
            run.version = 3
            step = next_of(steps)
            await played.finish(0, 1, version=4)
            await step
            run.version = 3
            with pytest.raises(Rewound, match="version 3 is served, and version 4 was before"):
                await anext(steps)
            assert played.cancelled == [2, 3]

    played_out(work())
