"""Nothing trained, or the machine lost, several times in a row: every way to train gives up alike, and waits
alike for a runtime that takes no step yet."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.clients.utils_finetune import TrainDataFormat
from dspy.teleprompt import grpo as dspys

from launcher.client import GRPO, PolicyLM, Session, Trajectory, TrajectoryGroup, connect
from launcher.client.art import SlipwayBackend
from launcher.client.autorl import autorl
from launcher.client.failures import EndpointLost, Rewound, TrainingFailed
from launcher.client.no_progress import MAX_EMPTY_STEPS, MAX_LATE_STEPS
from launcher.client.request_bodies import SupervisedExample
from launcher.client.schema import NO_VARIANCE
from launcher.client.wire import PATIENCE_VARIABLE
from runtime.shared import learnable
from tests.support import abuses
from tests.support.played_judge import fair_text, played_judge
from tests.support.small_counts import FLAT
from tests.support.small_door import error
from tests.support.small_run import PATIENCE, TOKEN, SmallRun, answering

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm")]

# It takes this many steps, one after the other.
Loop = Callable[[Session, int], None]
MODEL = SimpleNamespace(
    name="agent", project="tests", trainable=True, base_model="tiny", _internal_config=None
)


def student(session: Session) -> Any:
    program = dspy.Predict("english -> french, note")
    program.set_lm(PolicyLM(session))
    return program


def examples() -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(2)]


def conversation(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "mot"}]


def grpo(session: Session, steps: int) -> None:
    sizes: dict[str, Any] = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 2}
    GRPO(abuses.length, num_train_steps=steps, session=session, **sizes).compile(
        student(session), trainset=examples()
    )


def dspys_grpo(session: Session, steps: int) -> None:
    settings = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 4, "exclude_demos": True}
    optimizer: Any = dspys.GRPO(metric=abuses.length, num_train_steps=steps, num_threads=4, **settings)
    optimizer.compile(student(session), trainset=examples())


def dspys_finetune(session: Session, steps: int) -> None:
    data = [{"messages": conversation(number)} for number in range(steps)]
    settings = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
    job = PolicyLM(session).finetune(data, TrainDataFormat.CHAT, settings)
    job.thread.join()
    job.result()


def again_after_a_loss(step: Callable[[int], object], steps: int) -> None:
    """As a program does that rolls out again when the machine was lost."""
    for number in range(steps):
        try:
            step(number)
        except Rewound:
            continue


def choices(number: int) -> list[dict[str, Any]]:
    """Two answers to one question, by the names of their samples."""
    message = {"role": "assistant", "content": "mot"}
    return [{"message": message, "slipway": {"sample": f"s{number}/{member}"}} for member in range(2)]


def trajectories(session: Session, steps: int) -> None:
    def step(number: int) -> None:
        turns = [[*conversation(number)[:1], choice] for choice in choices(number)]
        made = (Trajectory(messages_and_choices=it, reward=float(k)) for k, it in enumerate(turns))
        session.train([TrajectoryGroup(made)])

    again_after_a_loss(step, steps)


def task(session: Session, steps: int) -> None:
    written = itertools.count()

    def judge(asked: Any) -> str:
        if "<trajectory" in asked.text:
            return fair_text(asked)
        if "Write " in asked.text:
            return json.dumps({"scenarios": [f"letter {next(written)}" for _ in range(8)]})
        return '{"better": "first"}'

    with played_judge(judge) as played:
        sizes = {"n": 4, "validation": 2, "groups_per_step": 1, "rollouts": 2}
        asyncio.run(autorl("Sum up a letter.", session, judge=played.model, steps=steps, **sizes))


def arts_train(session: Session, steps: int) -> None:
    backend = art_backend(session)

    def step(number: int) -> None:
        turns = [[*conversation(number)[:1], choice] for choice in choices(number)]
        made = [
            SimpleNamespace(messages_and_choices=it, reward=float(k), tools=None, additional_histories=[])
            for k, it in enumerate(turns)
        ]
        asyncio.run(backend.train(MODEL, [SimpleNamespace(trajectories=made, exceptions=[])]))

    again_after_a_loss(step, steps)


def arts_sft(session: Session, steps: int) -> None:
    async def learn() -> None:
        made = [
            SimpleNamespace(messages=lambda number=number: conversation(number), tools=None)
            for number in range(steps)
        ]
        config = SimpleNamespace(batch_size=1, learning_rate=None)
        async for _ in art_backend(session)._train_sft(MODEL, iter(made), config, {}):
            pass

    asyncio.run(learn())


def art_backend(session: Session) -> SlipwayBackend:
    return SlipwayBackend(max_empty_steps=session.max_empty_steps)


LOOPS: dict[str, Loop] = {
    "GRPO": grpo,
    "dspy.GRPO": dspys_grpo,
    "BootstrapFinetune": dspys_finetune,
    "run.train": trajectories,
    "autorl": task,
    "ART train": arts_train,
    "ART train_sft": arts_sft,
}
# Those whose steps have rewards.
REWARDED = {name: loop for name, loop in LOOPS.items() if name not in ("BootstrapFinetune", "ART train_sft")}
# The others' own program begins again: that is the caller's affair.
GO_BACK = {name: loop for name, loop in LOOPS.items() if name not in ("autorl", "ART train_sft")}


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    numbers = itertools.count()
    run.answer = lambda asked: answering(french="mot" * (1 + next(numbers) % 5), note="n")(asked)
    run.refuse_empty = False
    return run


def nothing_to_train(run: SmallRun) -> tuple[int, dict[str, Any]]:
    return error(422, "no sample of this step can be trained", "nothing_to_train")


def empty_step(reason: str) -> dict[str, Any]:
    """The runtime's answer to a step that teaches nothing."""
    counts = {"groups": 1, "samples": 2, "dropped": {reason: 2}}
    why = f"nothing of this step can be learned: 2 {reason}"
    return {"id": 0, "key": "k", "state": "empty", "counts": counts, "error": why}


def cut_off(run: SmallRun) -> tuple[int, dict[str, Any]]:
    return 202, empty_step("truncated")


def equal_rewards(run: SmallRun) -> tuple[int, dict[str, Any]]:
    return 202, empty_step(FLAT)


def emptied(run: SmallRun) -> tuple[int, dict[str, Any]]:
    """Taken in, and empty when its turn comes."""
    number, version = run.next_step(), run.version - 1
    run.version = version
    run.steps[number] = empty_step(FLAT) | {"id": number}
    return 202, {"id": number, "key": "k", "state": "queued"}


def lost(run: SmallRun) -> tuple[int, dict[str, Any]]:
    """The machine that rolled these out, and another one each time."""
    run.machine += 1
    return lost_before(run)


def lost_before(run: SmallRun) -> tuple[int, dict[str, Any]]:
    """Rollouts of a machine whose loss is known already."""
    status, body = run.rewound("these rollouts")
    body["error"]["lost_at"] = float(run.machine)
    return status, body


def queue_is_full(run: SmallRun) -> tuple[int, dict[str, Any]]:
    return error(429, "16 steps are waiting already", "queue_full")


def disk_is_full(run: SmallRun) -> tuple[int, dict[str, Any]]:
    return error(503, "the machine's disk cannot store it: No space left on device", "disk")


def ends(run: SmallRun, outcomes: Iterable[Any]) -> list[Any]:
    """The run's answers to the steps, one after the other: None trains it. Those that were asked for."""
    real, given, seen = run.step, iter(outcomes), list[Any]()

    def step(request: Any) -> Any:
        outcome = next(given, None)
        seen.append(outcome)
        return real(request) if outcome is None else outcome(run)

    run.step = step  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("most", [MAX_EMPTY_STEPS, 5])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_steps_of_which_nothing_can_be_trained_end_every_loop_alike(
    run: SmallRun, loop: Loop, most: int
) -> None:
    seen = ends(run, itertools.repeat(nothing_to_train))
    session = connect(run.base_url, TOKEN, PATIENCE, max_empty_steps=most)
    with pytest.raises(TrainingFailed, match=rf"^Nothing could be trained in {most} steps in a row"):
        loop(session, 9)
    assert len(seen) == most


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_c69_empty_steps_of_cut_off_answers_end_every_loop_alike(run: SmallRun, loop: Loop) -> None:
    seen = ends(run, itertools.repeat(cut_off))
    with pytest.raises(TrainingFailed, match=r"^Nothing could be trained in 3 steps in a row\n.*truncated"):
        loop(run.session(), 9)
    assert len(seen) == MAX_EMPTY_STEPS


@pytest.mark.parametrize("loop", REWARDED.values(), ids=REWARDED)
def test_c69_equal_rewards_end_no_loop_and_begin_the_count_anew(run: SmallRun, loop: Loop) -> None:
    few = [nothing_to_train] * (MAX_EMPTY_STEPS - 1)
    seen = ends(run, [*few, *[equal_rewards] * 4, *few, emptied, *few, None])
    loop(run.session(), len(few) * 3 + 6)
    assert len(seen) == len(few) * 3 + 6 and len(run.requests) == 1


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_c69_a_step_that_is_emptied_while_it_waits_is_none_and_the_loop_goes_on(
    run: SmallRun, loop: Loop
) -> None:
    seen = ends(run, [None, emptied, None])
    loop(run.session(), 3)
    assert len(seen) == 3 and len(run.requests) == 2


@pytest.mark.parametrize("ended", [equal_rewards, emptied])
def test_c69_a_result_of_an_empty_step_has_its_counts_and_no_step(
    session: Session, run: SmallRun, ended: Any
) -> None:
    ends(run, [ended])
    turns = [[*conversation(1)[:1], choice] for choice in choices(1)]
    pair = TrajectoryGroup(Trajectory(messages_and_choices=it, reward=1.0) for it in turns)
    result = session.train([pair], state={"at": 1})
    assert (result.step, result.version, result.trained) == (None, None, 0)
    assert (result.groups, result.dropped) == (1, {FLAT: 2})
    assert session.read_state() == {"at": 1}, "the next step keeps it"


def test_c69_a_step_of_a_plain_session_tells_that_it_is_empty(session: Session, run: SmallRun) -> None:
    ends(run, [equal_rewards])
    status = session.step(examples=[SupervisedExample(messages=conversation(1))])
    assert (status.id, status.state, status.version) == (0, "empty", None)
    assert "empty" in repr(status) and "no version" in repr(status)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_step_that_is_trained_begins_the_count_anew(run: SmallRun, loop: Loop) -> None:
    few = [nothing_to_train] * (MAX_EMPTY_STEPS - 1)
    seen = ends(run, [*few, None, *few])
    loop(run.session(), len(few) * 2 + 1)
    assert len(run.requests) == 1 and len(seen) == len(few) * 2 + 1


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_full_queue_and_a_full_disk_are_waited_for_by_every_loop_alike(run: SmallRun, loop: Loop) -> None:
    seen = ends(run, [queue_is_full, disk_is_full, None])
    loop(run.session(), 1)
    assert seen == [queue_is_full, disk_is_full, None] and len(run.requests) == 1


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_disk_that_stays_full_ends_every_loop_alike(
    run: SmallRun, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(run, itertools.repeat(disk_is_full))
    session = connect(run.base_url, TOKEN, replace(PATIENCE, away_seconds=0.1))
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.1")  # ART's backend connects by itself
    with pytest.raises(EndpointLost, match=r"^No answer from the run .*\n.*No space left on device"):
        loop(session, 1)
    assert not run.requests


@pytest.mark.parametrize("loop", GO_BACK.values(), ids=GO_BACK)
def test_the_third_loss_of_the_machine_in_a_row_ends_every_loop_alike(run: SmallRun, loop: Loop) -> None:
    seen = ends(run, [lost, lost, None, lost, lost, lost])
    with pytest.raises(TrainingFailed, match=r"^The run was rewound 3 times without a step in between"):
        loop(run.session(), 9)
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["run.train", "ART train"])
def test_one_loss_that_steps_gathered_before_tell_of_is_one(run: SmallRun, name: str) -> None:
    seen = ends(run, [lost, *[lost_before] * 4, lost, None])
    LOOPS[name](run.session(), 7)
    assert len(seen) == 7 and len(run.requests) == 1


@pytest.mark.parametrize("loop", GO_BACK.values(), ids=GO_BACK)
def test_a_loop_that_is_sent_back_by_one_loss_for_ever_ends(run: SmallRun, loop: Loop) -> None:
    seen = ends(run, [lost, *[lost_before] * 3 * MAX_LATE_STEPS])
    with pytest.raises(TrainingFailed, match=r"^The run was rewound 3 times"):
        loop(run.session(), 3 * MAX_LATE_STEPS)
    assert len(seen) == (3 + 2 * MAX_LATE_STEPS if loop in (trajectories, arts_train) else 3)


def test_a_loop_that_goes_on_after_the_error_has_the_whole_number_again(
    run: SmallRun, session: Session
) -> None:
    ends(run, [*[nothing_to_train] * (2 * MAX_EMPTY_STEPS), *[lost] * 6])
    for what in ("Nothing could be trained in 3", "Nothing could be trained in 3", "rewound 3"):
        with pytest.raises(TrainingFailed, match=what):
            trajectories(session, 9)


def test_steps_of_another_loop_in_between_are_steps(run: SmallRun, session: Session) -> None:
    few = [nothing_to_train] * (MAX_EMPTY_STEPS - 1)
    ends(run, [*few, None, *few])
    trajectories(session, len(few))
    session.step(examples=[SupervisedExample(messages=conversation(1))])
    trajectories(session, len(few))


def test_calls_without_any_group_are_not_counted(session: Session) -> None:
    for _ in range(MAX_EMPTY_STEPS + 1):
        assert session.train([]).step is None


def test_a_finetune_of_which_nothing_was_trained_is_an_error_with_the_reason(run: SmallRun) -> None:
    ends(run, itertools.repeat(nothing_to_train))
    with pytest.raises(TrainingFailed, match=r"^Nothing was trained\n.*no sample of this step"):
        dspys_finetune(run.session(), 2)


def test_a_number_that_is_set_later_counts(run: SmallRun, session: Session) -> None:
    seen = ends(run, itertools.repeat(nothing_to_train))
    session.max_empty_steps = 5
    with pytest.raises(TrainingFailed, match="in 5 steps in a row"):
        trajectories(session, 9)
    assert len(seen) == 5


def test_a_number_that_can_never_be_reached_is_refused(run: SmallRun) -> None:
    with pytest.raises(ValueError, match="max_empty_steps is a whole number of at least 1, not 0"):
        connect(run.base_url, TOKEN, PATIENCE, max_empty_steps=0)


def test_the_reason_of_equal_rewards_is_the_runtimes_own() -> None:
    """The client imports nothing of the runtime: it knows the reason by its text."""
    assert NO_VARIANCE == learnable.NO_VARIANCE
