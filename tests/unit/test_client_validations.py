"""An optimizer tells the run each of its validations, once over its lives (A19)."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from launcher.client import GRPO
from tests.support import abuses as a
from tests.support.lives import begin_life
from tests.support.small_run import SmallRun


def train(steps: int, **changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": steps,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
        "num_steps_for_val": 1,
    }
    grpo = GRPO(a.length, **{**settings, **changes})
    examples = [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(4)]
    grpo.compile(a.predict(), trainset=examples, valset=examples[:2])
    return grpo


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = a.varied
    return run


@pytest.mark.process
def test_a19_the_run_is_told_what_the_history_has(run: SmallRun) -> None:
    grpo = train(2, report_train_scores=True)
    told = [it for it in run.validations if it.name == "score"]
    history = [it for it in grpo.history if it["kind"] == "validation"]
    assert [it.step for it in told] == [0, 1, 2] == [it.version for it in told]
    assert {it.compile for it in told} == {grpo.summary["compile"]}
    for said, entry in zip(told, history, strict=True):
        assert said.score == entry["score"]
        assert said.standard_error == entry["standard_error"]
        assert (said.parse_rate, said.cut_off_rate) == (entry["parse_rate"], entry["cut_off_rate"])
        assert (said.examples, said.predictors) == (2, entry["predictors"])
    for it in told:  # each rollout by its name, for its texts
        rewards = [one.reward for one in it.rollouts if one.reward is not None]
        assert [one.group for one in it.rollouts] == ["held out 0", "held out 1"]
        assert sum(rewards) / 2 == pytest.approx(it.score)
        assert all(one.rollout.startswith("eval-") for one in it.rollouts)
    of_train = [it for it in run.validations if it.name == "train_score"]
    assert [it.score for it in of_train] == [it["train_score"] for it in history]


@pytest.mark.process
def test_a19_a_resumed_program_tells_each_validation_once(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    train(2)
    first = list(run.validations)
    begin_life(monkeypatch, 2)
    with run.lock:
        run.version = 2
    train(4)
    keys = [(it.compile, it.step) for it in run.validations]
    # The last of the first life rode on no step: said again, it is the same one to the gateway.
    assert sorted(set(keys)) == [(first[0].compile, step) for step in range(5)]
    again, before = (
        it.model_copy(update={"rollouts": []}) for it in (run.validations[len(first)], first[-1])
    )
    assert again == before
    assert len(keys) == 6


def test_a19_a_run_that_keeps_none_costs_no_training(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.keeps_validations = False
    assert train(2).summary["steps"] == 2
    assert capsys.readouterr().err.count("the run does not keep validations: it keeps no more") == 1
