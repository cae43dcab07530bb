"""Trajectories, groups and how they are gathered: the nouns of an agent's program, without a run (B10)."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from pydantic_core import to_json

from launcher.client import (
    History,
    Trajectory,
    TrajectoryGroup,
    gather_trajectories,
    gather_trajectory_groups,
    limit_concurrency,
    retry,
)
from launcher.client.trajectories import gather_context
from launcher.client.trajectories.gather_context import GatherContext
from launcher.client.trajectories.trajectory_group import PendingGroup

CALL = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": "Well?"}


def choice(content: str | None = "yes", **message: Any) -> Choice:
    said = {"role": "assistant", "content": content, **message}
    named = {"slipway": {"sample": "a:0", "version": 4}}
    return Choice.model_validate({"finish_reason": "stop", "index": 0, "message": said, **named})


async def made(reward: float, after: int = 0, **metrics: float) -> Trajectory:
    """A trajectory that comes after so many turns of the loop."""
    for _ in range(after):
        await asyncio.sleep(0)
    return Trajectory(messages_and_choices=[ASKED, choice()], reward=reward, metrics=dict(metrics))


async def failing(error: BaseException) -> Trajectory:
    raise error


# ------------------------------------------------------------------ one


def test_b10_the_history_is_sent_again_as_messages_with_the_calls_of_tools() -> None:
    entries = [ASKED, choice(None, tool_calls=[CALL]), {"role": "tool", "content": None}, choice("done")]
    expected = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "done"},
    ]
    assert Trajectory(messages_and_choices=entries).messages() == expected
    as_json = json.loads(to_json(History(messages_and_choices=entries)))
    assert History(**as_json).messages() == expected


def test_b10_for_logging_says_which_message_is_an_answer() -> None:
    one = Trajectory(messages_and_choices=[ASKED, choice()], reward=0.5, metadata={"task": "t"})
    one.log("a line")
    said = one.for_logging()
    assert [it["trainable"] for it in said["messages"]] == [False, True]
    assert (said["reward"], said["metadata"], said["logs"]) == (0.5, {"task": "t"}, ["a line"])
    json.dumps(said)


def test_b10_durations_are_metrics_of_it_added_up() -> None:
    one = Trajectory()

    async def work() -> None:
        async with one.track_duration("tool"):
            await asyncio.sleep(0)

    with one.track_duration("tool"):
        pass
    first = one.metrics["tool_duration"]
    asyncio.run(work())
    assert one.metrics["tool_duration"] > first > 0
    assert one.finish() is one
    assert one.metrics["duration"] >= one.metrics["tool_duration"]


def test_b10_a_group_keeps_trajectories_and_exceptions_and_is_the_same_from_its_json() -> None:
    one, other = asyncio.run(made(1.0)), asyncio.run(made(0.0))
    group = TrajectoryGroup(
        [one, ValueError("no"), other], exceptions=[KeyError("k")], metadata={"task": "t"}
    )
    assert [*group] == [one, other] and len(group) == 2
    assert [(it.type, it.message) for it in group.exceptions] == [
        ("<class 'ValueError'>", "no"), ("<class 'KeyError'>", "'k'"),
    ]  # fmt: skip
    again = TrajectoryGroup(**json.loads(to_json(group)))
    assert again.exceptions == group.exceptions
    assert again.metadata == {"task": "t"}
    assert [it.messages() for it in again] == [it.messages() for it in group]
    assert again.trajectories[0].messages_and_choices[1]["slipway"] == {"sample": "a:0", "version": 4}


def test_b10_a_group_is_made_of_a_generator_and_can_be_copied() -> None:
    one = asyncio.run(made(1.0))
    group = TrajectoryGroup(one for _ in range(3))
    for same in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):  # noqa: S301
        assert same == group and len(same) == 3


def test_b10_a_field_that_there_is_not_is_said() -> None:
    with pytest.raises(ValueError, match="rewards"):
        Trajectory(rewards=1.0)  # type: ignore[call-arg]


# ------------------------------------------------------------------ gathered


def test_b10_groups_of_coroutines_are_gathered_in_their_order_with_exceptions_as_data() -> None:
    groups = [
        TrajectoryGroup([made(0.0, after=5), failing(ValueError("no")), made(1.0)], metadata={"task": 1}),
        TrajectoryGroup(made(float(place), after=3 - place) for place in range(3)),
    ]
    assert all(isinstance(it, PendingGroup) for it in groups)
    first, second = asyncio.run(gather_trajectory_groups(groups, max_exceptions=1))
    assert [it.reward for it in first] == [0.0, 1.0]
    assert [it.message for it in first.exceptions] == ["no"]
    assert "ValueError: no" in first.exceptions[0].traceback
    assert first.metadata == {"task": 1}
    assert [it.reward for it in second] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("most", "failed", "passes"), [(0, 1, False), (2, 2, True), (2, 3, False),
                                                        (0.5, 2, True), (0.5, 3, False)])  # fmt: skip
def test_b10_one_exception_too_many_is_raised_and_ends_the_others(
    most: float, failed: int, passes: bool
) -> None:
    ended: list[str] = []

    async def slow() -> Trajectory:
        try:
            await asyncio.Event().wait() if not passes else None
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return Trajectory(reward=1.0)

    async def work() -> Any:
        rollouts = [failing(ValueError(str(place))) for place in range(failed)]
        groups = [TrajectoryGroup([*rollouts, *(slow() for _ in range(4 - failed))])]
        try:
            return await gather_trajectory_groups(groups, max_exceptions=most)
        except ValueError:
            return list(ended)  # by now, and not by the end of the loop

    if passes:
        (group,) = asyncio.run(work())
        assert (len(group), len(group.exceptions)) == (4 - failed, failed)
    else:
        assert asyncio.run(work()) == ["cancelled"] * (4 - failed)


def test_b10_a_cancelled_gathering_is_no_exception_of_a_rollout() -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            gather_trajectory_groups([TrajectoryGroup([failing(asyncio.CancelledError())])], max_exceptions=9)
        )


def test_b10_after_each_may_replace_a_group_split_it_or_leave_it_out() -> None:
    async def after(group: TrajectoryGroup) -> Any:
        reward = group.trajectories[0].reward
        return {0.0: group, 1.0: None, 2.0: [group, TrajectoryGroup(group.trajectories[:1])]}[reward or 0.0]

    groups = [TrajectoryGroup([made(float(place)), made(float(place))]) for place in range(3)]
    found = asyncio.run(gather_trajectory_groups(groups, after_each=after))
    assert [(it.trajectories[0].reward, len(it)) for it in found] == [(0.0, 2), (2.0, 2), (2.0, 1)]
    ready = [TrajectoryGroup([asyncio.run(made(1.0))])]
    assert asyncio.run(gather_trajectory_groups(ready, after_each=lambda group: group)) == ready


def test_b10_a_judge_that_fails_leaves_a_group_with_its_exception_and_no_reward() -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        raise TimeoutError("the judge")

    groups = [TrajectoryGroup([made(0.0), failing(ValueError("no"))], metadata={"task": 1})]
    (group,) = asyncio.run(gather_trajectory_groups(groups, max_exceptions=2, after_each=judge))
    assert ([*group], group.metadata) == ([], {"task": 1})
    assert sorted(it.message for it in group.exceptions) == ["no", "the judge"]


def test_b10_a_group_that_fails_as_a_whole_is_kept_as_its_exception() -> None:
    async def group(error: Exception | None) -> TrajectoryGroup:
        if error is not None:
            raise error
        return TrajectoryGroup([await made(1.0)])

    found = asyncio.run(gather_trajectory_groups([group(None), group(ValueError("no"))], max_exceptions=1))
    assert [(len(it), len(it.exceptions)) for it in found] == [(1, 0), (0, 1)]


def test_b10_trajectories_alone_are_gathered_with_an_exception_in_its_place() -> None:
    async def several() -> list[Trajectory]:
        return [await made(2.0), await made(3.0)]

    found = asyncio.run(
        gather_trajectories([made(1.0, after=3), failing(ValueError("no")), several()], max_exceptions=1)
    )
    assert found[0].reward == 1.0
    assert isinstance(found[1], ValueError)
    assert [it.reward for it in found[2]] == [2.0, 3.0]
    with pytest.raises(ValueError, match="no"):
        asyncio.run(gather_trajectories([failing(ValueError("no"))]))


@pytest.mark.parametrize("is_watched", [True, False])
def test_b10_progress_is_a_line_on_a_terminal_and_nothing_elsewhere(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_watched)
    groups = [TrajectoryGroup([made(0.0, moves=4), made(1.0, moves=6), failing(ValueError("no"))])]
    asyncio.run(gather_trajectory_groups(groups, pbar_desc="step 3", max_exceptions=1, max_metrics=1))
    said = capsys.readouterr().err
    if is_watched:
        assert "step 3: 2/3 reward=0.5" in said and "exceptions=1" in said and "moves" not in said
    else:
        assert not said


def test_b10_the_line_has_the_averages_of_all_metrics_or_of_so_many() -> None:
    context = GatherContext(total=2, description="gather")
    context.add(Trajectory(reward=1.0, metrics={"moves": 4, "won": True}))
    context.add(Trajectory(metrics={"moves": 5}))
    assert context.line() == "gather: 2/2 reward=1 moves=4.5 won=1"
    assert gather_context.current_context().max_exceptions == 0


@pytest.mark.parametrize(("given", "named"), [(None, "nothing"), (1.0, "a float")])
@pytest.mark.parametrize("in_a_group", [True, False])
def test_b10_a_rollout_that_returns_no_trajectory_is_said(given: Any, named: str, in_a_group: bool) -> None:
    async def rollout() -> Any:
        return given

    async def work() -> Any:
        if in_a_group:
            return await gather_trajectory_groups([TrajectoryGroup([rollout()])], max_exceptions=9)
        return await gather_trajectories([rollout()], max_exceptions=9)

    with pytest.raises(TypeError, match=f"must return its Trajectory, and one returned {named}"):
        asyncio.run(work())


def test_b10_a_metric_that_is_no_number_is_in_no_average() -> None:
    context = GatherContext(total=1, description="gather")
    one = Trajectory(reward=1.0, metrics={"moves": 4})
    one.metrics |= {"winner": "x", "length": None}  # type: ignore[dict-item]
    context.add(one)
    assert context.line() == "gather: 1/1 reward=1 moves=4"


# ------------------------------------------------------------------ bounded


def test_b10_so_many_calls_go_on_at_once_each_key_by_itself() -> None:
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    @limit_concurrency(2, derive_key=lambda key: key)
    async def call(key: str) -> None:
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        for _ in range(3):
            await asyncio.sleep(0)
        running[key] -= 1

    async def work() -> None:
        await asyncio.gather(*(call(key) for key in "abababababab"))

    for _ in range(2):  # in one loop and then in another
        asyncio.run(work())
        assert most == {"a": 2, "b": 2}


@pytest.mark.parametrize("is_async", [True, False])
def test_b10_a_call_is_tried_again_so_often_after_the_errors_that_were_named(
    is_async: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, int]] = []
    tries: list[int] = []

    def work(fails: int, error: type[Exception]) -> str:
        tries.append(fails)
        if len(tries) <= fails:
            raise error("not now")
        return "done"

    async def work_async(fails: int, error: type[Exception]) -> str:
        return work(fails, error)

    wrap = retry(3, delay=0, exceptions=(ConnectionError,), on_retry=lambda e, n: told.append((str(e), n)))
    tried: Callable[..., Any] = wrap(work_async) if is_async else wrap(work)

    def call(fails: int, error: type[Exception]) -> Any:
        tries.clear()
        result: Awaitable[Any] | Any = tried(fails, error)
        return asyncio.run(result) if is_async else result

    assert call(2, ConnectionError) == "done"
    assert told == [("not now", 1), ("not now", 2)]
    with pytest.raises(ConnectionError):
        call(3, ConnectionError)
    assert len(tries) == 3
    with pytest.raises(KeyError):
        call(1, KeyError)
    assert len(tries) == 1
    assert not capsys.readouterr().err
