"""GRPO with staleness that is killed, stopped or loses its machine: what another life rolls out again."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import dspy
import pytest

from launcher.client import TrainingFailed
from tests.support.lives import begin_life
from tests.support.pretend_rollouts import (
    Twice,
    key_of,
    metric,
    mostly_flat,
    plain,
    train,
)
from tests.support.small_run import Asked, SmallRun
from tests.support.staleness import PATIENCE, E, Held, K, Pools, ctrl_c, lags, of_training, trained

STEPS = 6
_moment = threading.Event()


def late(run: SmallRun) -> Any:
    """The first example of every second step is late: its step has left by then."""

    def answer(asked: Asked) -> Any:
        step, index = key_of(asked.tag("rollout") or "") if of_training(asked) else (1, 0)
        if index == 0 and step % 2 == 0:
            for _ in range(PATIENCE * 100):
                with run.lock:
                    if len(run.requests) > step or len(run.requests) == STEPS - 1:
                        break
                _moment.wait(0.01)
        return plain(asked)

    return answer


@pytest.mark.process
@pytest.mark.parametrize("after", range(1, STEPS))
def test_c43_killed_after_any_step_and_resumed_each_example_is_trained_once(
    run: SmallRun, pools: Pools, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    def killed(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        if len(run.requests) >= after:
            raise KeyboardInterrupt
        return float(len(prediction.french))

    killed.__qualname__ = metric.__qualname__  # it is the same work
    run.answer = late(run)
    run.before_wait = lambda _: pools.settle(lambda key: key[1] == 0 and key[0] % 2 == 0)
    begin_life(monkeypatch)
    changes: dict[str, Any] = {"staleness": 3, "num_train_steps": STEPS, "checkpoint": "none", "valset": 0}
    with pytest.raises(KeyboardInterrupt):
        train(run, metric=killed, **changes)
    done = len(run.requests)
    assert done >= after
    assert run.client_state is not None
    outstanding = run.client_state.get("pool", {}).get("tickets", [])
    assert (done % 2 == 0) or [done - 1, 0] in outstanding
    begin_life(monkeypatch, after_step=done)
    grpo = train(run, **changes)
    assert grpo.summary["steps"] == len(run.requests) == STEPS
    keys = [key for step in trained(run) for key in step]
    assert len(keys) == STEPS * E
    assert max(Counter(keys).values()) == 1
    left_out = {(n // E, n % E) for n in range(max(s * E + e for s, e in keys) + 1)} - set(keys)
    assert all(index == 0 and step % 2 == 0 for step, index in left_out), "only those that were late"
    assert len(left_out) <= STEPS // 2
    assert all(max(it) <= 3 for it in lags(run))


@pytest.mark.slow
def test_c43_killed_at_any_moment_again_and_again_each_example_is_trained_once(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants = random.Random(7)
    left = [0]

    def killed(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return float(len(prediction.french))

    killed.__qualname__ = metric.__qualname__
    run.answer, run.drop_flat = mostly_flat, True
    lives = 0
    while len(run.requests) < STEPS + 2:
        begin_life(monkeypatch, after_step=len(run.requests))
        left[0] = instants.randrange(2 * E * K, 14 * E * K)
        lives += 1
        with suppress(KeyboardInterrupt):
            train(
                run, metric=killed, staleness=2, dynamic_sampling=True, num_train_steps=STEPS + 2, valset=0,
                checkpoint="none",
            )  # fmt: skip
        assert lives < 100
    assert lives > 5
    keys = [key for step in trained(run) for key in step]
    assert max(Counter(keys).values()) == 1
    states = [request.client_state or {} for _, request in sorted(run.requests.items())]
    assert [it["step"] for it in states] == list(range(1, STEPS + 3))
    assert all(max(it) <= 2 for it in lags(run))
    varied = [
        sum(len({it.reward for it in group.members}) > 1 for group in request.groups)
        for _, request in sorted(run.requests.items())
    ]
    assert varied == [E] * (STEPS + 2)


@pytest.mark.process
def test_g21_with_staleness_nothing_of_a_lost_machine_is_trained(run: SmallRun) -> None:
    losing = threading.Event()

    def before_wait(number: int) -> None:
        if number == 3 and not losing.is_set():
            losing.set()
            with run.lock:
                run.lose_machine(1)

    run.answer, run.before_wait = plain, before_wait
    grpo = train(run, staleness=2, num_train_steps=6, valset=0)
    assert grpo.report.rewinds == 1
    rollouts = [
        it.rollout for number, step in run.requests.items() for group in step.groups for it in group.members
    ]
    assert len(rollouts) == len(set(rollouts)) == 6 * E * K
    assert not run.lost & set(rollouts[E * K :])
    assert [len(it) for it in trained(run)] == [E] * 6


@pytest.mark.process
def test_g21_a_machine_lost_by_more_steps_than_staleness_is_noticed_among_the_rollouts(run: SmallRun) -> None:
    """All that its successor answers is too old: none of it would ever fill a step."""
    gone = threading.Event()
    loose = threading.Lock()

    def answer(asked: Asked) -> Any:
        if of_training(asked):
            step, _ = key_of(asked.tag("rollout") or "")
            if (asked.tag("rollout") or "").endswith("-s3-e2-k3") and asked.tag("predictor") == "write":
                assert gone.wait(PATIENCE)  # what this run asks next is answered by the successor
            with loose, run.lock:
                if step == 4 and not gone.is_set():  # begun when step 3 was done
                    run.lose_machine(1)
                    gone.set()
                if len(run.asked) > 1000:
                    return 500, {"error": {"message": "for ever", "type": "t", "param": None, "code": None}}
        return plain(asked)

    run.answer = answer
    grpo = train(run, Twice(), staleness=1, num_train_steps=6, valset=0)
    assert grpo.report.rewinds == 1
    assert [len(it) for it in trained(run)] == [E] * 6


@pytest.mark.process
def test_ctrl_c_while_a_step_trains_ends_every_run(run: SmallRun, held: Held) -> None:
    over = threading.Semaphore(0)

    class Hanging(Twice):
        def forward(self, english: str) -> dspy.Prediction:
            try:
                return super().forward(english)
            except BaseException as error:
                if "this rollout is over" in str(error):
                    over.release()
                raise

    hung = threading.Semaphore(0)

    def answer(asked: Asked) -> Any:
        if of_training(asked) and key_of(asked.tag("rollout") or "")[0] > 0:
            hung.release()
            held.hold()
        return plain(asked)

    def before_wait(number: int) -> None:
        for _ in range(E * K):
            assert hung.acquire(timeout=PATIENCE)
        ctrl_c()
        held.hold()

    run.answer, run.before_wait = answer, before_wait
    with pytest.raises(KeyboardInterrupt):
        train(run, Hanging(), staleness=1, valset=0)
    asked = len(run.asked)
    held.set()
    for _ in range(E * K):
        assert over.acquire(timeout=PATIENCE), "a program that goes on asks in vain"
    assert len(run.asked) == asked


@pytest.mark.process
def test_a_metric_that_fails_ends_the_training_while_a_step_trains(run: SmallRun, held: Held) -> None:
    def broken(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        if run.requests:
            raise ValueError("the judge is broken")
        return float(len(prediction.french))

    def answer(asked: Asked) -> Any:
        if of_training(asked) and key_of(asked.tag("rollout") or "")[0] > 0:
            training.wait(PATIENCE)
        return plain(asked)

    training = threading.Event()

    def before_wait(number: int) -> None:
        training.set()
        held.hold()

    run.answer, run.before_wait = answer, before_wait
    with pytest.raises(TrainingFailed, match="gave no score 16 times"):
        train(run, metric=broken, staleness=2, valset=0)
    assert not held.in_vain
