"""How many runs are under way at once, what is said of it, and that none is beside an ended training."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM
from launcher.client.dspy.rollouts import DEFAULT_CONCURRENCY, MAX_CONCURRENCY, RolloutLimits
from launcher.client.dspy.training import Training
from tests.support.pretend_rollouts import data, metric, optimizer, plain, train
from tests.support.small_run import SmallRun

SAID = "rollouts at once, as the engines have places for so many"


@pytest.mark.parametrize(
    ("limits", "runs", "of_a_step", "at_once"),
    [
        pytest.param(RolloutLimits(), 1000, 0, DEFAULT_CONCURRENCY, id="nobody says how many places"),
        pytest.param(RolloutLimits(), 1000, 400, DEFAULT_CONCURRENCY, id="nor of a large step"),
        pytest.param(RolloutLimits(places=100), 1000, 400, 100, id="no more than places"),
        pytest.param(
            RolloutLimits(places=1000), 300, 0, MAX_CONCURRENCY, id="a validation's, of many places"
        ),
        pytest.param(RolloutLimits(places=1000), 1000, 400, 400, id="all of a step's own"),
        pytest.param(RolloutLimits(places=1000), 1000, 12, MAX_CONCURRENCY, id="and those of later steps"),
        pytest.param(RolloutLimits(places=1000), 7, 400, 7, id="no more than there are"),
        pytest.param(RolloutLimits(threads=3, places=1000), 300, 400, 3, id="as many as are asked for"),
        pytest.param(RolloutLimits(threads=500, places=8), 300, 12, 500, id="beyond the places too"),
    ],
)
def test_so_many_runs_are_under_way_at_once(
    limits: RolloutLimits, runs: int, of_a_step: int, at_once: int
) -> None:
    assert limits.concurrency(runs, of_a_step) == at_once


@pytest.mark.process
@pytest.mark.parametrize(
    ("places", "changes", "said"),
    [
        (None, {}, None),
        (DEFAULT_CONCURRENCY, {}, None),
        (DEFAULT_CONCURRENCY + 1, {}, DEFAULT_CONCURRENCY + 1),
        (1000, {}, MAX_CONCURRENCY),
        (1000, {"num_dspy_examples_per_grpo_step": 100}, 400),
        (1000, {"num_threads": 300}, None),
    ],
)
def test_more_runs_at_once_than_usual_are_said(
    run: SmallRun,
    capsys: pytest.CaptureFixture[str],
    places: int | None,
    changes: dict[str, Any],
    said: int | None,
) -> None:
    run.answer, run.places = plain, places
    train(run, num_train_steps=1, valset=0, checkpoint="none", **changes)
    lines = [line for line in capsys.readouterr().err.splitlines() if SAID in line]
    expected = [f"up to {said} {SAID}: a metric that asks a judge asks as often (num_threads=N allows N)"]
    assert [line.removeprefix("grpo: ") for line in lines] == (expected if said else [])


@pytest.mark.process
def test_no_version_is_scored_beside_a_training_that_is_over(run: SmallRun) -> None:
    """Where nothing is rolled out, nobody would do the runs within the training's bound."""
    loops: list[Training] = []

    class Kept(Training):
        def __post_init__(self) -> None:
            super().__post_init__()
            loops.append(self)

    class Keeping(GRPO):
        _training_class = Kept

    run.answer = plain
    student = dspy.Predict("english -> french")
    student.set_lm(PolicyLM(run.session()))
    shape = vars(optimizer(num_train_steps=1))
    names = ("num_train_steps", "num_dspy_examples_per_grpo_step", "num_rollouts_per_grpo_step", "seed")
    Keeping(metric, **{name: shape[name] for name in names}).compile(student, trainset=data(3))
    (loop,) = loops
    asked = len(run.asked)
    with pytest.raises(RuntimeError, match="nothing is rolled out any more"):
        loop._evaluate(data(2), run.name_of(1))
    assert len(run.asked) == asked
    assert loop._evaluate(data(2), None).outcomes == {"scored": 2}, "here and now it is scored all the same"
