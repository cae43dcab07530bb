"""GRPO with staleness: validations beside the training, each on its own version."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import dspy
import pytest

from launcher.client import GRPO
from tests.support.lives import begin_life
from tests.support.pretend_rollouts import (
    Twice,
    plain,
    train,
)
from tests.support.small_run import Asked, SmallRun, answering
from tests.support.staleness import PATIENCE, E, Held, K, ctrl_c, of_training, trained

_moment = threading.Event()


def holding(held: Held) -> Any:
    """What is scored of version 2 is held."""

    def answer(asked: Asked) -> Any:
        if not of_training(asked) and asked.body["model"].startswith("policy@v2"):
            held.hold()
        return plain(asked)

    return answer


def validated(grpo: GRPO) -> list[tuple[int, int]]:
    return [(it["step"], it["version"]) for it in grpo.history if it["kind"] == "validation"]


@pytest.mark.process
def test_a_validation_beside_training_scores_its_own_version_by_name(run: SmallRun, held: Held) -> None:
    def before_wait(number: int) -> None:
        if number == 3:  # the one after step 2 is held until another step was sent
            held.set()

    run.answer, run.before_wait = holding(held), before_wait
    grpo = train(run, staleness=1, num_train_steps=6)
    assert not held.in_vain
    asked = Counter((it.body["model"], it.version) for it in run.asked if not of_training(it))
    names = {version: run.name_of(version) for version in (2, 4)}
    # Before the first step and after the last nothing else is to be done.
    assert asked == {("policy", 0): 3, (names[2], 2): 3, (names[4], 4): 3, ("policy", 6): 3}
    assert validated(grpo) == [(0, 0), (2, 2), (4, 4), (6, 6)]
    states = [request.client_state or {} for _, request in sorted(run.requests.items())]
    assert states[2]["validating"] == {"step": 2, "version": 2, "weights": run.weights[2]}
    assert "validating" not in states[-1]


@pytest.mark.process
def test_a_validation_is_no_more_steps_behind_than_the_rollouts_are_ahead(run: SmallRun) -> None:
    """Of what is scored later the weights may be gone."""
    sent: set[int] = set()

    def answer(asked: Asked) -> Any:
        if not of_training(asked) and asked.body["model"].startswith("policy@v2"):
            for _ in range(PATIENCE * 100):
                if len(run.requests) > 2:
                    break
                _moment.wait(0.01)
            _moment.wait(0.5)  # in which another could be sent
            sent.add(len(run.requests))
        return plain(asked)

    run.answer = answer
    train(run, staleness=1, num_train_steps=6)
    assert sent == {3}


@pytest.mark.process
def test_g21_a_validation_whose_version_went_with_the_machine_is_a_rewind(run: SmallRun) -> None:
    losing, lost = threading.Event(), list[str]()

    def answer(asked: Asked) -> Any:
        is_of_lost = not of_training(asked) and asked.body["model"].startswith("policy@v2")
        if is_of_lost and not losing.is_set():
            for _ in range(PATIENCE * 100):  # until the step is done beside which it is made
                if told.is_set():
                    break
                _moment.wait(0.01)
            _moment.wait(0.2)  # in which nothing but this validation is waited for
            with run.lock:
                if not losing.is_set():
                    losing.set()
                    lost.append(run.name_of(2))
                    run.lose_machine(1)
        if asked.body["model"] in lost:
            return 404, {"error": {"message": "not here", "type": "t", "param": None, "code": "gone"}}
        return plain(asked)

    told = threading.Event()
    run.answer, run.before_wait = answer, lambda number: told.set() if number == 3 else None
    grpo = train(run, staleness=1, num_train_steps=6)
    assert losing.is_set() and grpo.report.rewinds == 1
    assert [len(it) for it in trained(run)] == [E] * 6
    assert [it["step"] for it in grpo.history if it["kind"] == "validation"] == [0, 2, 4, 6]


@pytest.mark.process
def test_a_validation_beside_rollouts_does_not_look_into_a_program_that_these_write_into(
    run: SmallRun,
) -> None:
    """What walks through it while a dict in it grows is stopped by Python, and with it the training."""
    walked: list[threading.Thread] = []

    class Remembering(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write = dspy.Predict("english -> french")

        def named_parameters(self) -> Any:
            walked.append(threading.current_thread())
            return super().named_parameters()

        def forward(self, english: str) -> dspy.Prediction:
            return self.write(english=english)

    run.answer = plain
    grpo = train(run, Remembering(), staleness=1, num_train_steps=4)
    assert validated(grpo) == [(0, 0), (2, 2), (4, 4)]
    assert set(walked) == {threading.main_thread()}


@pytest.mark.process
def test_what_a_validation_asks_from_threads_of_its_own_is_not_counted_as_untrained(run: SmallRun) -> None:
    class Threaded(Twice):
        def forward(self, english: str) -> dspy.Prediction:
            thread = threading.Thread(target=lambda: self.judge(french=english))
            thread.start()
            thread.join()
            return super().forward(english)

    checked = answering(check="a")
    run.answer = lambda asked: plain(asked) if asked.tag("rollout") else checked(asked)
    grpo = train(run, Threaded(), num_train_steps=2)
    assert len(validated(grpo)) == 2
    assert grpo.report.calls_outside_rollouts == 2 * E * K


@pytest.mark.process
@pytest.mark.parametrize("is_kept", [True, False])
def test_c43_a_validation_that_was_under_way_is_made_again_on_the_same_weights_or_not_at_all(
    run: SmallRun,
    monkeypatch: pytest.MonkeyPatch,
    held: Held,
    capsys: pytest.CaptureFixture[str],
    is_kept: bool,
) -> None:
    dead = threading.Event()

    def before_wait(number: int) -> None:
        if number == 3 and not dead.is_set():
            ctrl_c()
            dead.wait(PATIENCE)

    run.answer, run.before_wait = holding(held), before_wait
    begin_life(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(run, staleness=2)
    dead.set()
    held.set()
    assert len(run.requests) == 3
    if not is_kept:
        run.weights[2] = "0" * 64
    begin_life(monkeypatch, after_step=3)
    grpo = train(run, staleness=2)
    assert not held.in_vain
    assert validated(grpo) == [(2, 2), (4, 4), (5, 5)][not is_kept :]
    said = capsys.readouterr().err
    assert ("no validation after 2 steps: its weights are not kept any more" in said) is not is_kept
