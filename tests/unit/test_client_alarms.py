"""Alarms: each way a training goes wrong while every step succeeds is said once, and can end it (C47)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, TrainingFailed, correlation
from launcher.client.alarms import Alarms, StalenessBucket, Thresholds, repeated_share
from tests.support.abuses import Asked, answering, length, member, predict
from tests.support.small_run import CUT_OFF, SmallRun
from tests.support.step_records import step_record

STEPS = 12


def healthy(step: int) -> dict[str, Any]:
    """A step of a training that goes well; rewards rise a little, as they should."""
    return {
        "rewards": [0.1 * step, 1 + 0.1 * step],
        "flat_groups": 0.1,
        "length": 20.0,
        "repetition": 0.05,
        "truncation": 0.02,
        "entropy": 0.8,
        "kl_behaviour": 1e-4,
        "kl_reference": 0.1,
        "masked": 1e-4,
        "masked_answers": 0.02,
        "ratio_max": 8.0,
        "lags": {
            0: StalenessBucket(300, 0, 0.0),
            1: StalenessBucket(500, 15, 3.0),
            2: StalenessBucket(400, 20, 8.0),
        },
    }


def raised(changes: Callable[[int], dict[str, Any]], held_out: Callable[[int], float] = float) -> Alarms:
    """A training of STEPS steps with a validation before the first and after each third."""
    alarms = Alarms()
    alarms.observe_validation(0, held_out(0))
    for step in range(1, STEPS + 1):
        alarms.observe(step_record(step, **{**healthy(step), **changes(step)}))
        if step % 3 == 0:
            alarms.observe_validation(step, held_out(step))
    return alarms


def test_a_training_that_goes_well_raises_none() -> None:
    assert raised(lambda step: {}).raised == []


def test_answers_that_become_a_little_longer_without_the_reward_are_no_alarm() -> None:
    assert raised(lambda step: {"length": 20.0 + step, "reward_length": 0.5}).raised == []


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([[(1.0, 10.0), (2.0, 20.0)], [(5.0, 1.0), (6.0, 11.0)]], 1.0),
        ([[(1.0, 20.0), (2.0, 10.0)]], -1.0),
        ([[(1.0, 10.0)], [(2.0, 20.0)]], math.nan),  # between examples alone
        ([[(1.0, 3.0), (1.0, 4.0)], []], math.nan),
    ],
)
def test_a_correlation_is_that_among_the_tries_of_an_example(
    groups: list[list[tuple[float, float]]], found: float
) -> None:
    assert correlation.within_groups(groups) == pytest.approx(found, nan_ok=True)


def test_answers_that_repeat_as_much_from_the_start_are_no_alarm() -> None:
    assert raised(lambda step: {"repetition": 0.6}).raised == []


def test_what_may_be_the_cause_is_named_before_flat_groups() -> None:
    found = raised(lambda step: {"flat_groups": 1.0, "truncation": 1.0}).raised
    assert [it.name for it in found] == ["truncation", "flat_groups"]


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("flat_groups", lambda step: {"flat_groups": 0.95}, "in 95% of the groups all rewards are equal"),
        (
            "length",
            lambda step: {"length": 20.0 * 1.1**step},
            "2.1 times as long as at the start (24 -> 52 tok",
        ),
        (
            "repetition",
            lambda step: {"repetition": 0.05 * step},
            "30% of their four-word sequences were said before, 10% at the start, and the reward rose",
        ),
        (
            "length",
            lambda step: {"length": 20.0 + step, "reward_length": 0.95},
            "as at the start (22 -> 28 tokens), and the reward follows it: a correlation of 0.95",
        ),
        (
            "repetition",
            lambda step: {"repetition": 0.01 * step, "reward_repetition": 0.95},
            "7% of their four-word sequences were said before, 2% at the start, and the reward follows it",
        ),
        ("entropy", lambda step: {"entropy": 0.8 * 0.7**step}, "entropy 0.409 -> 0.034 nats a token"),
        ("truncation", lambda step: {"truncation": 0.3}, "30% of the rollouts had an answer cut off"),
        ("kl_behaviour", lambda step: {"kl_behaviour": 0.06}, "0.060 nats a token away from the policy that"),
        ("kl_reference", lambda step: {"kl_reference": 1.5}, "1.500 nats a token away from the model before"),
        (
            "masked",
            lambda step: {"masked": 0.02, "masked_answers": 0.3},
            "2.0% of the tokens, in 30% of the answers, are past train.dual_clip and teach nothing",
        ),
        (
            "ratio_max",
            lambda step: {"ratio_max": 200.0 + step},
            "in each of the last 3 steps the trainer found a token 201 or more times as likely",
        ),
        (
            "stale",
            lambda step: {
                "lags": {
                    0: StalenessBucket(300, 0),
                    1: StalenessBucket(500, 55),
                    2: StalenessBucket(400, 125),
                }
            },
            "31% of the tokens 2 steps old are past the clip or train.dual_clip (1 step: 11%, 0 steps: 0%)",
        ),
        (
            "kl_behaviour",
            lambda step: {
                "lags": {
                    0: StalenessBucket(300, 0),
                    1: StalenessBucket(500, 15, 15.0),
                    2: StalenessBucket(400, 30, 40.0),
                }
            },
            "0.100 nats a token away from the one that sampled 2 steps ago (1 step: 0.030, 0 steps: 0.000)",
        ),
        (
            "kl_behaviour",  # an engine far from the trainer: it is not their age
            lambda step: {
                "kl_behaviour": 0.1,
                "lags": {0: StalenessBucket(300, 0, 30.0), 2: StalenessBucket(400, 30, 40.0)},
            },
            "0.100 nats a token away from the policy that sampled",
        ),
    ],
)
def test_c47_each_way_to_go_wrong_is_raised_once_and_by_name(
    name: str, changes: Callable[[int], dict[str, Any]], says: str
) -> None:
    found = raised(changes).raised
    assert [it.name for it in found] == [name]
    assert says in found[0].text


def test_c47_a_reward_that_rises_while_the_held_out_score_does_not_is_raised() -> None:
    def steep(step: int) -> dict[str, Any]:
        return {"rewards": [0.2 * step, 1 + 0.2 * step]}

    assert raised(steep, held_out=float).raised == []  # both rise
    (alarm,) = raised(steep, held_out=lambda step: 0.5).raised
    assert (alarm.name, alarm.step) == ("held_out", 9)
    assert "the held-out score does not (0.500 -> 0.500 over 3 validations)" in alarm.text
    assert (
        raised(lambda step: {"rewards": [0.0, 1.0]}, held_out=lambda step: 0.5).raised == []
    )  # neither does


def test_what_was_not_measured_raises_nothing() -> None:
    alarms = Alarms()
    for step in range(5):
        assert alarms.observe(step_record(step, entropy=float("nan"))) == []
    assert alarms.observe_validation(5, float("nan")) == []


def test_a_single_odd_step_is_no_alarm() -> None:
    odd = {"length": 60.0, "truncation": 0.7, "masked": 0.02, "ratio_max": 4e8}
    assert raised(lambda step: odd if step == 5 else {}).raised == []


@pytest.mark.parametrize(
    ("lags", "says"),
    [
        # A few tokens say nothing, and what is no longer there is over.
        (lambda step: {1: StalenessBucket(900, 20), 2: StalenessBucket(40, 30)}, ""),
        (lambda step: {2: StalenessBucket(400, 200)} if step % 3 else {1: StalenessBucket(400, 8)}, ""),
        (lambda step: {2: StalenessBucket(400, 0 if step % 3 else 200)}, ""),
        # Of the policy's own answers nothing is too old, whatever their bounds do.
        (lambda step: {0: StalenessBucket(900, 400), 1: StalenessBucket(400, 20)}, ""),
        (
            lambda step: {1: StalenessBucket(900, 300), 2: StalenessBucket(40, 30)},
            "33% of the tokens 1 step old are past",
        ),
        (
            lambda step: {1: StalenessBucket(400, 100), 4: StalenessBucket(400, 20)},
            "25% of the tokens 1 step old are past",
        ),
    ],
)
def test_c50_a_lag_is_judged_where_it_is_steady_and_of_weight(
    lags: Callable[[int], dict[int, StalenessBucket]], says: str
) -> None:
    found = raised(lambda step: {"lags": lags(step)}).raised
    assert [it.name for it in found] == (["stale"] if says else [])
    assert all(says in it.text for it in found)


def test_a_threshold_is_moved_by_name() -> None:
    alarms = Alarms(Thresholds.of({"length": 1.2, "window": 1}))
    alarms.observe(step_record(1, length=10.0))
    assert [it.name for it in alarms.observe(step_record(2, length=13.0))] == ["length"]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("le chat noir", 0.0),
        ("one two three four five six", 0.0),
        ("a b c d a b c d a b c d", 1 - 4 / 9),
        ("no " * 100, 1 - 1 / 97),
    ],
)
def test_repetition_is_the_share_of_four_word_sequences_said_before(text: str, share: float) -> None:
    assert repeated_share(text) == pytest.approx(share)


# ----------------------------------------------------------------- in a training


def train(**changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": 6,
        "num_dspy_examples_per_grpo_step": 1,
        "num_rollouts_per_grpo_step": 4,
        "num_steps_for_val": 2,
    }
    optimizer = GRPO(length, **{**settings, **changes})
    data = [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(2)]
    try:
        optimizer.compile(predict(), trainset=data, valset=data)
    except TrainingFailed as error:
        optimizer.summary["error"] = str(error)
    return optimizer


def cut_off(asked: Asked) -> str:
    text = answering(french="mot" + "x" * member(asked))(asked)
    return text.partition("\n\n")[0] + CUT_OFF if member(asked) else text


def test_c47_an_alarm_is_said_once_in_the_terminal_and_in_every_record(
    run: SmallRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = cut_off
    optimizer = train()
    said = [line for line in capfd.readouterr().err.splitlines() if "ALARM" in line]
    assert said == [
        "grpo: ALARM truncation after 3 steps: 75% of the rollouts had an answer cut off at the length limit"
    ]
    written = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    assert [it["name"] for it in written if it["kind"] == "alarm"] == ["truncation"]
    assert [it["kind"] for it in written[1:]] == [it["kind"] for it in optimizer.history]
    assert optimizer.report.alarms == optimizer.summary["report"]["alarms"] == ["truncation"]
    assert optimizer.summary["steps"] == 6


def test_c47_on_alarm_stop_ends_the_training_with_the_best_policy_served(run: SmallRun) -> None:
    run.answer = lambda asked: best_at_first(asked) if asked.tag("purpose") else cut_off(asked)

    def best_at_first(asked: Asked) -> str:
        return answering(french="mot" * (3 if run.version == 2 else 1))(asked)

    optimizer = train(on_alarm="stop")
    assert "Training stopped after 3 of 6 steps on an alarm\ntruncation: 75%" in optimizer.summary["error"]
    assert len(run.requests) == 3
    assert (run.pinned[-1], run.restored) == ("step-000002", ["step-000002"])


def test_c47_repetition_and_length_are_measured_on_the_answers(run: SmallRun) -> None:
    def rambling(asked: Asked) -> str:
        return answering(french="et puis " * (4 * run.version + member(asked)) + "fin")(asked)

    run.answer = rambling
    assert set(train().report.alarms) == {"repetition", "length"}


@pytest.mark.process
def test_c50_what_a_bound_has_masked_is_in_the_steps_line_and_much_of_it_an_alarm(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.metrics = {"trained_tokens": 100.0, "masked_tokens": 2.0, "masked_sequences": 1.0, "ratio_max": 400.0}
    run.answer = lambda asked: answering(french="mot" + "x" * member(asked))(asked)
    assert train().report.alarms == ["masked", "ratio_max"]
    said = capfd.readouterr().err
    assert "trained 4 of 4 (masked 2 tokens in 1 answer) · v1" in said
    assert "2.0% of the tokens, in 25% of the answers, are past train.dual_clip" in said
    run.metrics = {"trained_tokens": 100.0, "masked_tokens": 0.0, "ratio_max": 1.5}
    assert train().report.alarms == []
    assert "masked" not in capfd.readouterr().err


@pytest.mark.process
def test_c50_what_the_bounds_stop_of_old_answers_is_in_the_records_and_an_alarm(
    run: SmallRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def at_lag(lag: int, tokens: float, clipped: float, masked: float) -> dict[str, float]:
        figures = {"trained_tokens": tokens, "clip_fraction": clipped, "masked_tokens": masked}
        figures["kl_behaviour"] = 0.03 * lag
        return {f"lag{lag}/{name}": value for name, value in figures.items()}

    run.metrics = {"trained_tokens": 600.0, **at_lag(0, 400.0, 0.0, 0.0), **at_lag(2, 200.0, 0.22, 4.0)}
    run.answer = lambda asked: answering(french="mot" + "x" * member(asked))(asked)
    assert train().report.alarms == ["kl_behaviour", "stale"]
    said = capfd.readouterr().err
    assert "24% of the tokens 2 steps old are past the clip or train.dual_clip (0 steps: 0%)" in said
    assert "0.060 nats a token away from the one that sampled 2 steps ago (0 steps: 0.000)" in said
    written = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    assert {it["metrics"]["lag2/clip_fraction"] for it in written if it["kind"] == "step"} == {0.22}
    run.metrics = {"trained_tokens": 600.0, "clip_fraction": 0.3}  # a runtime from before
    assert train().report.alarms == []


def test_c47_what_the_trainer_measures_is_looked_at_too(run: SmallRun) -> None:
    run.metrics = {"kl_behaviour": 0.2, "kl_reference": 0.0, "entropy": 0.5}
    run.answer = lambda asked: answering(french="mot" + "x" * member(asked))(asked)
    assert train().report.alarms == ["kl_behaviour"]
