"""The best of a training: judged on the examples that both validations have scored, or not at all."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from launcher.client import GRPO, evaluate
from launcher.client.dspy.score_comparison import is_comparable, mean_gain, rounded
from tests.support import abuses as a
from tests.support.small_run import SmallRun, answering

Table = dict[int, list[float | None]]
"""By the version that is served: the metric's score of each held-out example, None where it has none."""


def train(run: SmallRun, table: Table) -> GRPO:
    """A step for each further version, validated after each; the metric reads its scores off the table."""
    run.answer = lambda asked: answering(french=f"v{run.version}")(asked)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
        kind, number = example.english.split()
        return table[int(prediction.french[1:])][int(number)] if kind == "held" else float(number)

    grpo = GRPO(
        metric,
        num_train_steps=len(table) - 1,
        num_dspy_examples_per_grpo_step=1,
        num_rollouts_per_grpo_step=2,
        num_steps_for_val=1,
    )
    grpo.compile(a.predict(), trainset=named("train", 2), valset=named("held", len(table[0])))
    return grpo


def named(kind: str, count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"{kind} {i}", french="mot").with_inputs("english") for i in range(count)]


def test_c54_a_better_mean_of_other_examples_is_not_better(run: SmallRun) -> None:
    """One easy example of four against two."""
    grpo = train(run, {0: [3.0, 3.0, None, None], 1: [9.0, None, None, None]})
    assert run.pinned == []
    assert grpo.summary["best"] == 3.0
    assert [it["best"] for it in grpo.history if it["kind"] == "validation"] == [True, False]


def test_c54_better_on_the_shared_examples_is_better_whatever_the_means_say(run: SmallRun) -> None:
    grpo = train(run, {0: [1.0, 1.0, 10.0, None], 1: [2.0, 2.0, None, 2.0]})
    assert run.pinned == ["step-000001"]
    assert run.best == ("step-000001", grpo.summary["compile"])
    assert run.restored == []
    assert grpo.summary["best"] == 2.0


def test_c54_a_last_validation_that_says_too_little_does_not_keep_the_last_policy(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    grpo = train(run, {0: [1.0] * 4, 1: [2.0] * 4, 2: [9.0, None, None, None]})
    assert run.restored == ["step-000001"] == [grpo.summary["restored"]]
    said = capfd.readouterr().err
    assert "only 1 of 4 examples have a score, too few for a comparison" in said
    assert "the end cannot be compared" in said


def test_c54_too_few_scores_at_the_start_are_no_best_to_beat(run: SmallRun) -> None:
    train(run, {0: [9.0, None, None, None], 1: [2.0] * 4})
    assert run.pinned == ["step-000001"]


def test_c54_a_best_that_is_not_kept_is_said_and_its_training_is_not_lost(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.prunes = True
    grpo = train(run, {0: [1.0] * 2, 1: [3.0] * 2, 2: [2.0] * 2})
    assert (run.pinned, run.restored, grpo.summary["restored"]) == ([], [], None)
    assert (grpo.summary["steps"], grpo.summary["best"]) == (2, 3.0)
    said = capfd.readouterr().err
    assert "step-000001, the best so far, is not kept: there is no checkpoint 'step-000001'" in said
    assert "step-000001 is not kept any more; the last one stays served" in said


def test_an_equal_end_is_kept_as_it_is(run: SmallRun) -> None:
    train(run, {0: [1.0, 1.0], 1: [0.1, 2.3], 2: [2.3, 0.1]})
    assert (run.pinned, run.restored) == (["step-000001"], [])


def test_what_two_evaluations_differ_by_is_of_the_examples_both_scored(run: SmallRun) -> None:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
        number = int(example.english.split()[1])
        return None if number == missing else float(number * factor)

    missing, factor = 3, 1
    before = evaluate(a.predict(), named("held", 4), metric)
    missing, factor = 0, 2
    after = evaluate(a.predict(), named("held", 4), metric)
    assert after.scores == [None, 2.0, 4.0, 6.0]
    assert after.difference(before) == pytest.approx((1 + 2) / 2)
    assert after.difference_error(before) == pytest.approx(0.5)


def test_gain_is_the_mean_difference_of_pairs_and_nothing_below_a_share() -> None:
    assert mean_gain([1.0, 2.0, None], [0.0, None, 5.0]) is None
    assert mean_gain([1.0, 2.0, None], [0.0, 4.0, 5.0]) == pytest.approx(-0.5)
    assert mean_gain(rounded([0.1, 0.2, 0.3]), rounded([0.3, 0.1, 0.2])) == 0.0
    assert not is_comparable([None, None, 1.0]) and not is_comparable([])
    assert rounded([1 / 3, None]) == [0.333333, None]
