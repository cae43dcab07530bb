"""Groups rolled out ahead of the training, by rollouts that end when a test says so (issue 14)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.client import (
    Rewound,
    Session,
    TrainingFailed,
    Trajectory,
    TrajectoryGroup,
    gather_ahead,
    gather_trajectory_groups,
    limit_concurrency,
)
from launcher.client.trajectories.ahead import StepGroups
from tests.support.small_run import SmallRun

E, K = 2, 2
PATIENCE = 15


@pytest.fixture
def run() -> Iterator[SmallRun]:
    run = SmallRun(refuse_empty=False)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def session(run: SmallRun) -> Session:
    return run.session()


def answered(version: int | None, reward: float | None) -> Trajectory:
    said = {"slipway": {"sample": "a:0", "version": version}} if version is not None else {}
    entry = {"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}} | said
    return Trajectory(messages_and_choices=[entry], reward=reward)


@dataclass
class Played:
    """Groups of `K` rollouts; those of group n come by `finish(n)`."""

    session: Session
    begun: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ends: dict[tuple[int, int], asyncio.Future[Trajectory]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Of what was cancelled, for whom its end waits for.
    hold: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    async def rollout(self, number: int, member: int) -> Trajectory:
        if not member:
            self.begun.append(number)
        end = self.ends[number, member] = asyncio.get_running_loop().create_future()
        self.changed.set()
        try:
            return await end
        except asyncio.CancelledError:
            if number in self.hold:
                await self.hold[number]
            for _ in range(5):  # it has something to put in order
                await asyncio.sleep(0)
            if not member:
                self.cancelled.append(number)
            raise

    def group(self, number: int) -> Any:
        return TrajectoryGroup((self.rollout(number, member) for member in range(K)), metadata={"n": number})

    def given(self, count: int) -> Iterator[Any]:
        for number in range(count):
            yield self.group(number)

    async def finish(self, *numbers: int, version: int | None = None, rewards: Any = (0.0, 1.0)) -> None:
        for number in numbers:
            await self.until(lambda number=number: (number, K - 1) in self.ends)
            for member in range(K):
                self.ends[number, member].set_result(answered(version, rewards[member]))
        await turns()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def has_begun(self, *numbers: int) -> None:
        """These, and no others."""
        await self.until(lambda: len(self.begun) >= len(numbers))
        await turns()
        assert self.begun == [*numbers]


async def turns() -> None:
    """All that can go on without an answer has."""
    for _ in range(30):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def ahead(played: Played, groups: Any = None, **said: Any) -> AsyncIterator[Any]:
    bounds: dict[str, Any] = {"per_step": E, "staleness": 1, "pbar_desc": None} | said
    given = played.given(1000) if groups is None else groups
    async with contextlib.aclosing(gather_ahead(played.session, given, **bounds)) as steps:
        yield steps


@contextlib.asynccontextmanager
async def releasing(held: asyncio.Future[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        held.set_result(None)


def next_of(steps: Any) -> asyncio.Task[StepGroups]:
    return asyncio.create_task(anext(steps))


def played_out(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it; nothing is left behind by it, and Python has no word to say of it."""
    complaints: list[Any] = []

    async def heard() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(PATIENCE):
            return await work

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return asyncio.run(heard())
        finally:
            gc.collect()
            assert not complaints
            assert not [it for it in warned if "await" in str(it.message) or "Task" in str(it.message)]


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
            played_out(work(wrong))  # pyright: ignore[reportArgumentType] - as a program without types has it


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


# ------------------------------------------------------------------ exceptions, and the end


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


def test_of_a_list_what_is_in_no_step_is_not_said_to_be_never_awaited(session: Session) -> None:
    async def work() -> None:
        played = Played(session)
        async with ahead(played, [*played.given(9)], steps=1) as steps:
            step = next_of(steps)
            await played.finish(0, 1)
            assert [(await step).numbers] + [it.numbers async for it in steps] == [[0, 1]]

    played_out(work())


def test_what_is_no_place_is_said(session: Session) -> None:
    async def work() -> None:
        async with ahead(Played(session), [], place={"place": {"steps": 1}}) as steps:
            await anext(steps)

    with pytest.raises(ValueError, match=r"groups\.place.*\['place'\]"):
        played_out(work())


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
