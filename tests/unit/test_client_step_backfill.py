"""What comes late belongs to no step: a run that is over asks in vain and adds nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM
from tests.support import abuses as a
from tests.support.small_run import Asked, SmallRun
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = a.varied
    return run


def examples(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(count)]


def optimizer(**changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": 1,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
        "checkpoint": "none",
    }
    return GRPO(a.length, **{**settings, **changes})


def test_c22_an_answer_that_comes_after_its_step_is_in_no_step_and_its_program_asks_in_vain(
    run: SmallRun,
) -> None:
    """The answers of one rollout of the first step are held back until the second step has been trained."""
    second_trained, ended = threading.Event(), []

    def answer(asked: Asked) -> str:
        if "-s0-" in (asked.tag("rollout") or "") and a.member(asked) == 0:
            second_trained.wait(30)
        return a.varied(asked)

    def body(ask: Any, english: str) -> dspy.Prediction:
        try:
            first = ask(english=english)
            if len(first.french) > 3:
                return first
            again = ask(english=english)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        if second_trained.is_set():
            ended.append("answered")
        return again

    run.answer = answer
    grpo = optimizer(num_train_steps=2, rollout_seconds=5)
    grpo.compile(a.Program(body), trainset=examples(2))
    late = {f"{it.tag('rollout')}" for it in run.asked if "-s0-" in (it.tag("rollout") or "")}
    second_trained.set()
    wait_until(lambda: len(ended) == 2, what="both programs have ended")
    assert ended == ["RolloutEnded"] * 2
    members = [it for group in run.requests[1].groups for it in group.members]
    assert [it.failure for it in members].count("overdue: no result within 5 s") == 2
    assert not late & {it.rollout for group in run.requests[2].groups for it in group.members}
    assert grpo.report.outcomes == {"overdue": 2, "scored": 14}
    assert grpo.report.dropped == {"overdue: no result within 5 s": 2}


def test_an_interrupt_in_the_middle_is_raised_at_once_and_ends_every_rollout(run: SmallRun) -> None:
    """As Ctrl-C does; the program's threads end by themselves, and what was done is known."""
    hold, at_work, ended = threading.Event(), threading.Semaphore(0), []

    def answer(asked: Asked) -> str:
        if run.requests:  # the second step
            at_work.release()
            hold.wait(30)
        return a.varied(asked)

    def body(ask: Any, english: str) -> dspy.Prediction:
        try:
            ask(english=english)
            return ask(english=english)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    def interrupt() -> None:
        assert at_work.acquire(timeout=120) and at_work.acquire(timeout=120)
        os.kill(os.getpid(), signal.SIGINT)

    run.answer = answer
    threading.Thread(target=interrupt, daemon=True).start()
    grpo = optimizer(num_train_steps=5, num_threads=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            grpo.compile(a.Program(body), trainset=examples(2))
    finally:
        signal.signal(signal.SIGINT, before)
        hold.set()
    assert (grpo.summary["steps"], grpo.report.steps, len(run.requests)) == (1, 1, 1)
    wait_until(lambda: len(ended) == 2, what="both programs have ended")
    assert ended == ["RolloutEnded"] * 2
    assert len(run.asked) == 16 + 2


def test_after_the_training_the_lm_is_as_it_was_but_for_its_name(run: SmallRun) -> None:
    lm = PolicyLM(run.session(), cache=True, temperature=1.0, max_tokens=9)
    program = a.predict()
    program.set_lm(lm)
    optimizer().compile(program, trainset=examples(2), valset=examples(2))
    assert program.lm is lm
    assert (lm.cache, lm.kwargs["temperature"], lm.kwargs["max_tokens"]) == (True, 1.0, 9)
    assert lm.model == run.name_of(1)


def test_no_rollout_and_no_validation_is_answered_from_dspys_cache(run: SmallRun) -> None:
    program = a.predict()
    program.set_lm(PolicyLM(run.session(), cache=True, temperature=1.0))
    data = examples(1) * 2
    for _ in range(2):
        optimizer(num_train_steps=2).compile(program, trainset=data, valset=data)
    rollouts = [it.tag("rollout") for it in run.asked]
    assert len(rollouts) == len(set(rollouts)) == 2 * (2 * 8 + 2 * 2)


def test_asynchronous_programs_leave_no_connection_behind(run: SmallRun) -> None:
    """Each rollout has an event loop of its own, and so a pool of its own."""
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        optimizer(num_rollouts_per_grpo_step=32).compile(a.OnlyAsynchronous(), trainset=examples(2))
        assert len(os.listdir("/proc/self/fd")) < before + 20
    finally:
        gc.enable()
