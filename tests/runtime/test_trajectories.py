"""Groups of trajectories, trained: each answer in them once, or counted (B10, B12)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.chat_completion import Choice

from launcher.client import Session, StepFailed, Trajectory, TrajectoryGroup, gather_trajectory_groups
from launcher.client.trajectories.members import NAMED_TWICE, NO_ANSWER, NO_REWARD, OTHER_MODEL
from launcher.client.trajectories.results import StepResult
from tests.runtime.queue_run import QueueRun
from tests.support.small_counts import FLAT
from tests.support.small_run import TOKEN

OTHER = Choice.model_validate(
    {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "from elsewhere"}}
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueRun]:
    monkeypatch.setenv("LAUNCH_RUN_DIR", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "machine").mkdir()
    run = QueueRun(state=tmp_path / "machine")
    run.answer = lambda asked: f"answer {len(run.asked)}"
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def session(run: QueueRun) -> Session:
    return run.session()


@pytest.fixture
def client(run: QueueRun) -> Iterator[OpenAI]:
    with OpenAI(base_url=run.base_url, api_key=TOKEN, max_retries=0) as client:
        yield client


def talk(client: OpenAI, reward: Any, turns: int = 1, **more: Any) -> Trajectory:
    """A conversation with the policy, in which each turn sends again what there was."""
    made = Trajectory(reward=reward, **more)
    for turn in range(turns):
        made.messages_and_choices.append({"role": "user", "content": f"question {turn}"})
        answered = client.chat.completions.create(model="policy", messages=made.messages())  # type: ignore[arg-type]
        made.messages_and_choices.append(answered.choices[0])
    return made


def named(*trajectories: Trajectory) -> list[str]:
    """The samples that are in them."""
    return [
        it.model_extra["slipway"]["sample"]
        for one in trajectories
        for it in one.messages_and_choices
        if isinstance(it, Choice) and it.model_extra
    ]


def figures(result: StepResult) -> tuple[int, int, dict[str, int]]:
    return result.trained, result.joined, result.dropped


def test_b10_two_conversations_are_trained_turn_by_turn_as_one_sequence_each(
    run: QueueRun, session: Session, client: OpenAI, capfd: pytest.CaptureFixture[str]
) -> None:
    group = TrajectoryGroup([talk(client, 1.0, turns=3), talk(client, 0.0, turns=2)])
    result = session.train([group], learning_rate=1e-5, loss="dapo")
    assert (result.step, result.version, result.groups) == (1, 1, 1)
    assert figures(result) == (5, 3, {})
    assert result.metrics == {"loss": 0.5}
    assert sorted(run.trained()[1]) == sorted(named(*group))
    settings = run.submitted[0].settings
    assert settings is not None
    assert settings.model_dump(exclude_none=True) == {"learning_rate": 1e-5, "loss": "dapo"}
    assert "slipway: step 1: 5 answers trained, 3 joined" in capfd.readouterr().err


def test_b10_a_result_may_be_awaited_and_a_loop_goes_on_beside_a_step(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    group = TrajectoryGroup([talk(client, 1.0), talk(client, 0.0)])
    run.held.set()

    async def work() -> StepResult:
        step = asyncio.create_task(session.train_async([group]))
        async with asyncio.timeout(60):
            while not (run.state / "steps" / "000001").exists():
                await asyncio.sleep(0.01)
        assert not step.done()  # and this coroutine went on
        run.held.clear()
        first = await step
        assert await session.train([group]) == first
        return first

    assert asyncio.run(work()).step == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Trajectory(reward=1.0)], "pass TrajectoryGroup"),
        ([asyncio.sleep], "not iterable"),
    ],
)
def test_b10_what_is_no_group_is_said(session: Session, given: list[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        session.train(given)


def test_b10_groups_that_nobody_awaited_and_settings_that_mean_nothing_are_said(session: Session) -> None:
    async def never() -> Trajectory:
        return Trajectory()

    coroutine = never()
    with pytest.raises(TypeError, match="await gather_trajectory_groups"):
        session.train([TrajectoryGroup([coroutine])])
    coroutine.close()
    with pytest.raises(TypeError, match="'learnin_rate'; did you mean 'learning_rate'"):
        session.train([], learnin_rate=1.0)  # type: ignore[call-arg]


# ------------------------------------------------------------------ B12


@pytest.mark.parametrize(
    ("rewards", "trained", "dropped"),
    [
        ([], 0, {}),
        ([1.0], 0, {FLAT: 1}),
        ([0.5, 0.5, 0.5], 0, {FLAT: 3}),
        ([1.0, 0.0, math.nan, math.inf], 2, {"reward not finite": 2}),
        ([1.0, 0.0, None], 2, {NO_REWARD: 1}),
        ([True, False], 2, {}),
        ([math.nan, math.nan], 0, {"reward not finite": 2}),
    ],
)
def test_b12_a_groups_rewards_decide_what_is_trained_and_the_rest_is_counted(
    session: Session, client: OpenAI, rewards: list[Any], trained: int, dropped: dict[str, int]
) -> None:
    result = session.train([TrajectoryGroup([talk(client, reward) for reward in rewards])])
    assert figures(result) == (trained, 0, dropped)
    took = bool(trained)
    assert (result.step, result.version) == ((1, 1) if took else (None, None))  # C69
    assert session.version == int(took)


def test_b12_a_group_of_exceptions_alone_takes_no_step_and_counts_each(session: Session) -> None:
    failed = TrajectoryGroup([ValueError("no"), TimeoutError(), ValueError("again")])
    result = session.train([failed])
    assert (result.step, figures(result)) == (
        None,
        (0, 0, {"raised ValueError": 2, "raised TimeoutError": 1}),
    )


def test_b12_a_trajectory_twice_is_trained_once(run: QueueRun, session: Session, client: OpenAI) -> None:
    good, bad = talk(client, 1.0, turns=2), talk(client, 0.0)
    result = session.train([TrajectoryGroup([good, bad, good]), TrajectoryGroup([bad])])
    assert figures(result) == (3, 1, {NAMED_TWICE: 3})
    assert sorted(run.trained()[1]) == sorted(named(good, bad))


def test_b12_what_an_earlier_step_has_trained_is_not_trained_again(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    old = talk(client, 1.0)
    session.train([TrajectoryGroup([old, talk(client, 0.0)])])
    fresh = [talk(client, 1.0), talk(client, 0.0)]
    result = session.train([TrajectoryGroup([old, *fresh])])
    assert (result.step, figures(result)) == (2, (2, 0, {"already trained": 1}))
    assert sorted(run.trained()[2]) == sorted(named(*fresh))


def test_b12_what_was_sampled_too_many_steps_ago_is_stale(session: Session, client: OpenAI) -> None:
    kept = talk(client, 1.0)
    for _ in range(3):
        session.train([TrajectoryGroup([talk(client, 1.0), talk(client, 0.0)])])
    assert figures(session.train([TrajectoryGroup([kept, talk(client, 0.0)])])) == (
        0, 0, {"stale": 1, FLAT: 1},
    )  # fmt: skip


def test_b12_another_models_turn_in_a_history_is_context_and_only_ours_is_trained(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    judged, plain = talk(client, 1.0), talk(client, 0.0)
    judged.messages_and_choices += [{"role": "user", "content": "Is that so?"}, OTHER]
    result = session.train([TrajectoryGroup([judged, plain, Trajectory(reward=1.0)])])
    assert figures(result) == (2, 0, {OTHER_MODEL: 1, NO_ANSWER: 1})
    assert sorted(run.trained()[1]) == sorted(named(judged, plain))


def test_b12_another_runs_answer_is_no_sample_here(session: Session, client: OpenAI) -> None:
    strange = Choice.model_validate(OTHER.model_dump() | {"slipway": {"sample": "elsewhere:0", "version": 1}})
    both = [Trajectory(messages_and_choices=[strange], reward=1.0), talk(client, 0.0)]
    assert figures(session.train([TrajectoryGroup(both)])) == (0, 0, {"no sample": 1, FLAT: 1})


def test_b12_an_evaluations_answer_is_never_trained(session: Session, client: OpenAI, run: QueueRun) -> None:
    held_out = talk(client.with_options(default_headers={"x-slipway-purpose": "eval"}), 1.0)
    group = TrajectoryGroup([held_out, talk(client, 1.0), talk(client, 0.0)])
    assert figures(session.train([group])) == (2, 0, {"evaluation": 1})
    assert not set(named(held_out)) & set(run.trained()[1])


def test_b12_additional_histories_are_trained_with_their_trajectory_each_answer_once(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    main, helper = talk(client, 1.0, turns=2), talk(client, 0.0)
    more = [
        {"messages_and_choices": helper.messages_and_choices},
        {"messages_and_choices": [*main.messages_and_choices[:2], OTHER]},
    ]
    whole = Trajectory(
        messages_and_choices=main.messages_and_choices,
        reward=1.0,
        additional_histories=more,  # type: ignore[arg-type]
    )
    other = talk(client, 0.0)
    result = session.train([TrajectoryGroup([whole, other])])
    assert figures(result) == (4, 1, {OTHER_MODEL: 1, NAMED_TWICE: 1})
    assert sorted(run.trained()[1]) == sorted(named(main, helper, other))


def test_b12_everything_at_once_adds_up(session: Session, client: OpenAI) -> None:
    """Trained and dropped are all choices, the trajectories without one, and the exceptions."""
    judged = talk(client, 1.0, turns=2)
    judged.messages_and_choices.append(OTHER)
    groups = [
        TrajectoryGroup([judged, talk(client, 0.0), talk(client, math.nan), KeyError("x")]),
        TrajectoryGroup([talk(client, 0.5), Trajectory(reward=1.0)]),
        TrajectoryGroup([]),
    ]
    result = session.train(groups)
    assert figures(result) == (
        3, 1, {OTHER_MODEL: 1, "reward not finite": 1, "raised KeyError": 1, FLAT: 1, NO_ANSWER: 1},
    )  # fmt: skip
    choices = len(named(*groups[0], *groups[1])) + 1
    assert result.trained + sum(result.dropped.values()) == choices + 1 + 1


# ------------------------------------------------------------------ B13


def test_b13_groups_sent_twice_are_one_step_and_otherwise_nothing_of_them_is_trained_again(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    group = TrajectoryGroup([talk(client, 1.0), talk(client, 0.0)])
    first = session.train([group], state={"done": 1})
    assert (
        session.train([group], state={"done": 1}) == run.session().train([group], state={"done": 1}) == first
    )
    other = session.train([group], state={"done": 2})
    assert (other.step, figures(other)) == (None, (0, 0, {"already trained": 2}))
    assert session.read_state() == {"done": 2}, "to be kept by the next step"
    assert run.session().read_state() == {"done": 1}
    assert run.trained() == {1: named(*group)}


def test_b13_a_step_that_failed_is_sent_again_as_another(
    run: QueueRun, session: Session, client: OpenAI
) -> None:
    group = TrajectoryGroup([talk(client, 1.0), talk(client, 0.0)])
    run.held.set()
    run.trouble = "the trainer died"
    with pytest.raises(StepFailed, match="the trainer died"):
        session.train([group], state={"done": 1})
    run.trouble = None
    run.held.clear()
    for of in (session, run.session()):
        result = of.train([group], state={"done": 1})
        assert (result.step, figures(result)) == (2, (2, 0, {}))


# ------------------------------------------------------------------ gathered, as a program does it


def test_b10_gathered_with_exceptions_and_a_judge_then_trained(run: QueueRun, session: Session) -> None:
    asked: list[str] = []

    async def rollout(client: AsyncOpenAI, task: int, place: int) -> Trajectory:
        if place == 3:
            raise TimeoutError("a tool")
        made = Trajectory(messages_and_choices=[{"role": "user", "content": f"task {task}"}])
        answered = await client.chat.completions.create(model="policy", messages=made.messages())  # type: ignore[arg-type]
        made.messages_and_choices.append(answered.choices[0])
        return made

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup | None:
        asked.append(group.trajectories[0].messages()[0]["content"])
        for place, one in enumerate(group):
            one.reward = place / 2
        return None if asked[-1] == "task 1" else group

    async def work() -> list[TrajectoryGroup]:
        async with AsyncOpenAI(base_url=run.base_url, api_key=TOKEN, max_retries=0) as client:
            return await gather_trajectory_groups(
                (TrajectoryGroup(rollout(client, task, place) for place in range(4)) for task in range(3)),
                max_exceptions=3,
                after_each=judge,
            )

    groups = asyncio.run(work())
    assert sorted(asked) == ["task 0", "task 1", "task 2"]
    result = session.train(groups)
    assert figures(result) == (6, 0, {"raised TimeoutError": 2})
