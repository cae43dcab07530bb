"""Dynamic sampling (A22): examples without variance are rolled out again as others, bounded and counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, TrainingFailed
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import AnswerRecord, ProgramRollout
from launcher.client.dspy.rollout_collector import zero_variance_examples
from launcher.client.dspy.rollouts import FinishedRun, ProgramRun
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.request_bodies import Group, Member
from tests.support.lives import begin_life
from tests.support.small_counts import FLAT
from tests.support.small_run import CUT_OFF, Asked, SmallRun

FORM = "[[ ## french ## ]]\n{}\n\n[[ ## completed ## ]]"
# Of twelve examples, those whose answers differ from one another.
VARIED = frozenset({1, 4, 7, 10, 11})
K, E = 4, 2


def number(asked: Asked) -> int:
    """The example that a request is about."""
    return int(asked.user.partition("word ")[2].split()[0])


def member(asked: Asked) -> int:
    return int((asked.tag("rollout") or "").rpartition("k")[2])


def varied(asked: Asked) -> str:
    """Members answer by their number on some examples, and all the same on the others."""
    return FORM.format("a" * (1 + member(asked) if number(asked) in VARIED else 1))


def train(run: SmallRun, steps: int = 3, metric: Any = None, **changes: Any) -> GRPO:
    student = dspy.Predict("english -> french")
    student.set_lm(PolicyLM(run.session()))
    run.drop_flat = True
    grpo = GRPO(
        metric or (lambda example, prediction, trace=None: float(len(prediction.french))),
        **{
            "num_train_steps": steps,
            "num_dspy_examples_per_grpo_step": E,
            "num_rollouts_per_grpo_step": K,
            "checkpoint": "none",
            "seed": 3,
            **changes,
        },
    )
    data = [dspy.Example(english=f"word {i} end", french="").with_inputs("english") for i in range(12)]
    grpo.compile(student, trainset=data)
    return grpo


def examples_of(run: SmallRun) -> dict[int, list[int]]:
    """By step, the examples it took, in their order."""
    found: dict[int, dict[int, int]] = {}
    for asked in run.asked:
        _, step, example, _ = (asked.tag("rollout") or "").split("-")
        found.setdefault(int(step[1:]), {})[int(example[1:])] = number(asked)
    return {step: [taken[place] for place in sorted(taken)] for step, taken in found.items()}


def rewards_of(group: Group) -> set[float | None]:
    return {it.reward for it in group.members}


@pytest.mark.process
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a22_examples_without_variance_are_rolled_out_again_as_others_until_there_are_enough(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], staleness: int
) -> None:
    run.answer = varied
    grpo = train(run, dynamic_sampling=5 * E * K, staleness=staleness)
    sampler = EpochSampler(12, E, 3)
    again = 0
    for step, taken in examples_of(run).items():
        assert taken[:E] == sampler.at(step)
        assert taken[E:] == sampler.extra_examples(step, len(taken) - E)
        assert sum(it in VARIED for it in taken) == E == len(set(taken) & VARIED)
        again += len(taken) - E
        groups = run.requests[step + 1].groups
        assert staleness or len(groups) == len(taken)
        assert sum(len(rewards_of(it)) > 1 for it in groups) == E
    assert again > 0
    report = grpo.report
    assert (report.groups_again, report.rollouts_again, report.short_steps) == (again, again * K, 0)
    # Each rollout that was made is in a group that was sent, and is trained or counted with its reason.
    assert report.rollouts == report.samples == len(run.asked) == 3 * E * K + again * K
    assert report.trained == 3 * E * K
    assert report.dropped == {FLAT: again * K}
    lines = [json.loads(it) for it in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    assert sum(it["groups_again"] for it in lines if it["kind"] == "step") == again
    assert staleness or f"resampled {len(examples_of(run)[0]) - E} group" in capsys.readouterr().err


@pytest.mark.process
def test_a22_no_two_of_a_steps_rollouts_have_one_seed_or_one_id(run: SmallRun) -> None:
    run.answer = varied
    train(run, dynamic_sampling=True)
    assert len({it.body["seed"] for it in run.asked}) == len(run.asked)
    assert len({it.tag("rollout") for it in run.asked}) == len(run.asked)


@pytest.mark.process
def test_a22_it_ends_at_its_bound_says_so_once_and_counts_each_rollout(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.answer = lambda asked: FORM.format("a" * (1 + member(asked) if number(asked) == 0 else 1))
    grpo = train(run, steps=8, dynamic_sampling=True)
    most = 3 * E * K
    made = Counter((it.tag("rollout") or "").split("-")[1] for it in run.asked)
    assert set(made.values()) == {E * K + most}
    report = grpo.report
    assert report.rollouts_again == 8 * most
    assert report.short_steps == 8
    assert report.trained + report.dropped[FLAT] == report.samples == len(run.asked)
    said = capsys.readouterr().err
    assert said.count("examples with something to learn, after 24 rollouts more") == 1


@pytest.mark.process
def test_s02_it_is_off_whatever_the_loss_unless_it_is_asked_for_and_its_cost_is_said(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.answer = varied
    for loss, asked, on in (
        ("grpo", {}, False),
        ("grpo", {"dynamic_sampling": None}, False),
        ("grpo", {"dynamic_sampling": True}, True),
        ("dapo", {}, False),
        ("dapo", {"dynamic_sampling": True}, True),
    ):
        run.settings = {"loss": loss}
        grpo = train(run, **asked)
        assert (grpo.report.rollouts_again > 0) is on
        said = capsys.readouterr().err
        assert said.count("grpo: dynamic sampling") == on
        assert ("up to 96 rollouts in all instead of 24, and as many calls of the metric" in said) is on


@pytest.mark.parametrize(
    ("value", "words"), [(3, "at least 4"), (0, "at least 4"), ("yes", "whole"), (2.0, "whole")]
)
def test_a22_a_bound_below_one_examples_rollouts_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"dynamic_sampling must be .*{words}"):
        GRPO(lambda example, prediction: 1.0, num_rollouts_per_grpo_step=K, dynamic_sampling=value)


@pytest.mark.process
def test_a22_a_resumed_training_takes_the_examples_it_would_have_taken(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.answer = varied
    begin_life(monkeypatch)
    train(run, steps=4, dynamic_sampling=True)
    whole = examples_of(run)
    run.asked.clear()
    with run.lock:
        run.lose_machine(2)
        run.lost.clear()
    begin_life(monkeypatch, after_step=2)
    grpo = train(run, steps=4, dynamic_sampling=True)
    assert grpo.summary["steps"] == 4
    assert examples_of(run) == {step: whole[step] for step in (2, 3)}


def test_a22_examples_that_a_judge_was_away_for_are_not_rolled_out_again(run: SmallRun) -> None:
    away = set(EpochSampler(12, E, 3).at(1))
    run.answer = varied

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
        return None if int(example.english.split()[1]) in away else 1.0

    with pytest.raises(TrainingFailed, match="Nothing was trained"):
        train(run, metric=metric, steps=2, dynamic_sampling=E * K, num_threads=1)
    # Where all earn 1 others are tried, and not where nobody judged.
    assert len(examples_of(run)[0]) > E == len(examples_of(run)[1])


def test_a22_others_come_before_any_again_and_more_begin_with_fewer() -> None:
    sampler = EpochSampler(7, 3, 5)
    for step in range(5):
        own = sampler.at(step)
        others = sampler.extra_examples(step, 20)
        assert set(others[: 7 - len(set(own))]) == set(range(7)) - set(own)
        assert set(others[:7]) == set(range(7))
        assert others[:7] == others[7:14]
        assert sampler.extra_examples(step, 4) == others[:4]
    assert sampler.extra_examples(0, 7) != EpochSampler(7, 3, 6).extra_examples(0, 7)
    assert EpochSampler(1, 2, 0).extra_examples(0, 3) == [0, 0, 0]


def a_run(index: int, number: int, cut_off: bool) -> FinishedRun:
    predictors = Predictors(dspy.Predict("english -> french"))
    rollout = ProgramRollout(f"r{index}-{number}", predictors)
    call = rollout.next_call("self")
    rollout.note_answer(call, AnswerRecord(version=1, empty=False, cut_off=cut_off, tokens=1, repeated=0.0))
    return FinishedRun(ProgramRun(dspy.Example(), index, rollout), "scored")


def test_a22_an_answer_that_the_trainer_leaves_out_makes_no_variance() -> None:
    finished = [a_run(0, 0, cut_off=True), a_run(0, 1, False), a_run(0, 2, False)]
    rewards = (-1.0, 0.5, 0.5)
    members = [
        Member(rollout=it.run.rollout.id, predictor="self", reward=reward)
        for it, reward in zip(finished, rewards, strict=True)
    ]
    groups = [Group(id="g", predictor="self", members=members)]
    assert zero_variance_examples(finished, groups, drops_truncated=True) == {0}
    assert zero_variance_examples(finished, groups, drops_truncated=False) == set()


@pytest.mark.process
def test_a22_whether_cut_off_answers_count_is_what_the_run_says(run: SmallRun) -> None:
    run.answer = lambda asked: FORM.format("a") + (CUT_OFF if member(asked) == 0 else "")
    for overlong, again in (("mask", True), ("keep", False)):
        run.settings = {"overlong": overlong}
        assert (train(run, steps=1, dynamic_sampling=True).report.rollouts_again > 0) is again
