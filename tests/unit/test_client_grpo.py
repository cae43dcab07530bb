"""The optimizer against a small endpoint: who gets which reward, what is excluded, what stops it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, EndpointLost, PolicyLM, TrainingFailed, evaluate
from runtime.shared.schema import Group, Member
from tests.support.lives import begin_life
from tests.support.small_run import CUT_OFF, TOKEN, Asked, SmallRun, answering

# A step's line, in its order: users' programs read the file.
STEP_KEYS = [
    "kind", "compile", "step", "epoch", "version", "reward", "spread", "rewards", "parse_rate",
    "cut_off_rate", "length", "repetition", "reward_length", "reward_repetition", "outcomes", "counts",
    "metrics", "rollout_seconds",
    "train_seconds", "groups_again", "lags", "groups_stale", "standard_error",
]  # fmt: skip
GOOD = "[[ ## french ## ]]\nbonjour\n\n[[ ## completed ## ]]"
BAD = "I would rather not"


def examples(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french=f"mot {i}").with_inputs("english") for i in range(count)]


def length(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return float(len(prediction.french))


def optimizer(metric: Callable[..., Any] = length, **changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": 1,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
        "checkpoint": "none",
    }
    return GRPO(metric, **{**settings, **changes})


def program() -> dspy.Module:
    return dspy.Predict("english -> french")


def member_index(asked: Asked) -> int:
    """Which of its group's rollouts a request is."""
    return int((asked.tag("rollout") or "").rpartition("k")[2])


def by_member(groups: list[Group]) -> dict[int, list[Member]]:
    found: dict[int, list[Member]] = {}
    for member in (member for group in groups for member in group.members):
        found.setdefault(int(member.rollout.rpartition("k")[2]), []).append(member)
    return found


# ----------------------------------------------------------------- rollouts and groups


def test_each_example_is_a_group_of_distinct_rollouts_at_the_training_temperature(run: SmallRun) -> None:
    student = program()
    assert optimizer().compile(student, trainset=examples(5)) is student
    groups = run.requests[1].groups
    assert [(it.predictor, len(it.members)) for it in groups] == [("self", 4), ("self", 4)]
    rollouts = [it.rollout for group in groups for it in group.members]
    assert len(set(rollouts)) == 8 == len(run.asked)
    assert {it.tag("rollout") for it in run.asked} == set(rollouts)
    assert {it.body["temperature"] for it in run.asked} == {1.0}
    assert all(it.reward == len("bonjour") for group in groups for it in group.members)


def test_c44_seeds_differ_inside_a_group_and_are_the_same_again(run: SmallRun) -> None:
    def seeds(seed: int) -> list[tuple[str, int]]:
        run.asked.clear()
        optimizer(seed=seed).compile(program(), trainset=examples(1))
        return sorted((str(it.tag("rollout")).partition("-")[2], it.body["seed"]) for it in run.asked)

    first = seeds(0)
    assert len({seed for _, seed in first}) == 8
    assert seeds(0) == first
    assert not {seed for _, seed in seeds(1)} & {seed for _, seed in first}


def test_settings_that_narrow_the_distribution_are_left_out_of_rollouts(run: SmallRun) -> None:
    student = program()
    student.set_lm(PolicyLM(run.session(), top_p=0.5, top_k=3, extra_body={"min_p": 0.1}))
    optimizer(train_kwargs={"temperature": 0.8}).compile(student, trainset=examples(2))
    assert not {"top_p", "top_k", "min_p"} & set(run.asked[0].body)
    assert {it.body["temperature"] for it in run.asked} == {0.8}


@pytest.mark.parametrize(
    "answer_of",
    [
        lambda example, pred, trace=None: 1,
        lambda example, pred, trace=None: True,
        lambda example, pred: 1.0,
        lambda example, pred, *rest: 1.0,
        lambda example, pred, trace=None: dspy.Prediction(score=1.0, feedback="well done"),
        lambda gold, pred, trace, pred_name, pred_trace: 1.0,
        lambda gold, pred, trace=None, pred_name=None, pred_trace=None: dspy.Prediction(score=1, feedback=""),
    ],
)
def test_every_form_of_metric_is_a_reward(run: SmallRun, answer_of: Callable[..., Any]) -> None:
    optimizer(answer_of).compile(program(), trainset=examples(2))
    assert {it.reward for it in run.requests[1].groups[0].members} == {1.0}


def test_c22_what_the_metric_cannot_judge_is_excluded_and_counted_never_zero(run: SmallRun) -> None:
    calls = Counter[str]()

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> Any:
        calls[example.english] += 1
        answers = [None, float("nan"), "a text", 1.0]
        if calls[example.english] == 1:
            raise RuntimeError(f"the judge was away at {example.english}")
        return answers[calls[example.english] - 1]

    grpo = optimizer(metric, num_threads=1, num_rollouts_per_grpo_step=4)
    grpo.compile(program(), trainset=examples(2))
    for group in run.requests[1].groups:
        assert [it.reward for it in group.members] == [None, None, None, 1.0]
        assert [it.failure for it in group.members] == [
            "unscored: the metric raised RuntimeError",
            "unscored: the metric returned nan",
            "unscored: the metric returned str, not a number",
            None,
        ]
    assert grpo.report.outcomes == {"unscored": 6, "scored": 2}
    assert (grpo.report.trained, grpo.report.dropped.total(), grpo.report.samples) == (2, 6, 8)


def test_g19_a_metric_that_always_raises_fails_the_training_with_its_message(run: SmallRun) -> None:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        raise KeyError("no such column")

    with pytest.raises(TrainingFailed, match=r"16 times in a row\n.*KeyError: 'no such column'"):
        optimizer(metric, num_train_steps=50, num_threads=2).compile(program(), trainset=examples(9))
    assert len(run.asked) <= 18


def test_an_answer_that_does_not_parse_gets_the_format_failure_and_is_asked_once(run: SmallRun) -> None:
    run.answer = lambda asked: BAD if member_index(asked) == 0 else GOOD
    grpo = optimizer(format_failure_score=-2.0)
    grpo.compile(program(), trainset=examples(2))
    for number, members in by_member(run.requests[1].groups).items():
        assert {it.reward for it in members} == {-2.0 if number == 0 else 7.0}
    assert len(run.asked) == 8  # no second try as JSON
    assert grpo.report.outcomes == {"unparsed": 2, "scored": 6}
    assert grpo.history[-1]["parse_rate"] == 0.75


def test_an_empty_answer_and_a_partly_parsed_one_are_format_failures_too(run: SmallRun) -> None:
    run.answer = lambda asked: "" if member_index(asked) == 0 else "[[ ## reasoning ## ]]\nso"
    grpo = optimizer()
    grpo.compile(dspy.Predict("english -> reasoning, french"), trainset=examples(2))
    assert {it.reward for group in run.requests[1].groups for it in group.members} == {-1.0}
    assert grpo.report.outcomes == {"unparsed": 8}


def test_an_answer_cut_off_at_its_limit_is_a_format_failure_though_it_parses(run: SmallRun) -> None:
    run.answer = lambda asked: GOOD.partition("\n\n")[0] + CUT_OFF if member_index(asked) == 0 else GOOD
    grpo = optimizer()
    grpo.compile(program(), trainset=examples(2))
    for number, members in by_member(run.requests[1].groups).items():
        assert {it.reward for it in members} == {-1.0 if number == 0 else 7.0}
    assert (grpo.history[-1]["parse_rate"], grpo.history[-1]["cut_off_rate"]) == (1.0, 0.25)


class Chain(dspy.Module):
    """`first`, then `second` on its answer; `last` raises when it is told to."""

    def __init__(self, last: Callable[[str], None] = lambda french: None) -> None:
        super().__init__()
        self.first = dspy.Predict("english -> french")
        self.second = dspy.Predict("french -> english")
        self.last = last

    def forward(self, english: str) -> dspy.Prediction:
        french = self.first(english=english).french
        self.last(french)
        return dspy.Prediction(french=french, back=self.second(french=french).english)


def chain_answer(asked: Asked) -> str:
    fields = {"french": "bonjour"} if asked.tag("predictor") == "first" else {"english": "hi"}
    return answering(**fields)(asked)


def whole(french: str) -> None:
    """As a program does that wants a number."""
    int(french)


def greedy_wrong(asked: Asked) -> str:
    """A number where it is sampled, and a word where it is greedy."""
    french = "bonjour" if asked.body["temperature"] == 0 else str(member_index(asked))
    return answering(french=french)(asked) if asked.tag("predictor") == "first" else chain_answer(asked)


def test_each_predictor_has_a_group_and_is_named_by_identity(run: SmallRun) -> None:
    run.answer = chain_answer
    grpo = optimizer()
    grpo.compile(Chain(), trainset=examples(2))
    groups = run.requests[1].groups
    assert [it.predictor for it in groups] == ["first", "second", "first", "second"]
    assert all(len(it.members) == 4 for it in groups)
    assert grpo.history[-1]["rewards"] == {"first": 7.0, "second": 7.0}


def test_two_predictors_may_share_a_signature_class(run: SmallRun) -> None:
    class Same(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = dspy.Predict("english -> french")
            self.second = dspy.Predict(self.first.signature)

        def forward(self, english: str) -> dspy.Prediction:
            return self.second(english=self.first(english=english).french)

    optimizer().compile(Same(), trainset=examples(2))
    assert [it.predictor for it in run.requests[1].groups] == ["first", "second"] * 2


def test_when_the_second_predictor_fails_the_first_is_not_blamed_for_its_format(run: SmallRun) -> None:
    run.answer = lambda asked: BAD if asked.tag("predictor") == "second" else GOOD
    optimizer(failure_score=0.25).compile(Chain(), trainset=examples(2))
    rewards = {group.predictor: {it.reward for it in group.members} for group in run.requests[1].groups}
    assert rewards == {"first": {0.25}, "second": {-1.0}}


def test_a_program_that_raises_gets_the_failure_score_for_what_it_sampled(run: SmallRun) -> None:
    def refuse(french: str) -> None:
        if french == "raise":
            raise ZeroDivisionError("as programs do")

    run.answer = lambda asked: (
        answering(french="raise")(asked) if "word 0" in asked.user else chain_answer(asked)
    )
    grpo = optimizer(failure_score=0.5)
    grpo.compile(Chain(refuse), trainset=examples(2))
    rewards = sorted((it.predictor, {m.reward for m in it.members}) for it in run.requests[1].groups)
    assert rewards == [("first", {0.5}), ("first", {7.0}), ("second", {7.0})]
    assert grpo.report.outcomes == {"crashed": 4, "scored": 4}
    assert grpo.history[0]["parse_rate"] == 0.5


def test_a_program_that_swallows_the_parse_error_is_scored_and_the_bad_answer_penalised(
    run: SmallRun,
) -> None:
    class Careful(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = dspy.Predict("english -> french")

        def forward(self, english: str) -> dspy.Prediction:
            for _ in range(3):
                try:
                    return self.ask(english=english)
                except Exception:  # noqa: BLE001 - programs are written so
                    continue
            return dspy.Prediction(french="")

    run.answer = lambda asked: BAD if asked.tag("call") == "0" and member_index(asked) == 0 else GOOD
    grpo = optimizer()
    grpo.compile(Careful(), trainset=examples(2))
    for number, members in by_member(run.requests[1].groups).items():
        found = {(it.call, it.reward) for it in members}
        assert found == ({(0, -1.0), (1, 7.0)} if number == 0 else {(None, 7.0)})
    assert grpo.report.outcomes == {"scored": 8}
    assert grpo.history[-1]["parse_rate"] == 0.75


def test_a_predictor_called_a_varying_number_of_times_is_one_member_a_rollout(run: SmallRun) -> None:
    class Loop(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = dspy.Predict("english -> french")

        def forward(self, english: str) -> dspy.Prediction:
            answers = [self.ask(english=english) for _ in range(3)]
            return answers[-1] if answers[0].french == "three" else self.ask(english=english)

    run.answer = lambda asked: answering(french="three" if member_index(asked) % 2 else "four")(asked)
    grpo = optimizer()
    grpo.compile(Loop(), trainset=examples(2))
    assert [len(it.members) for it in run.requests[1].groups] == [4, 4]
    assert grpo.report.samples == grpo.report.trained == 2 * (3 + 4 + 3 + 4)


def test_a_lost_answer_excludes_the_rollout_even_if_the_program_swallows_it(run: SmallRun) -> None:
    class Careless(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = dspy.Predict("english -> french")

        def forward(self, english: str) -> dspy.Prediction:
            first = self.ask(english=english)
            try:
                return self.ask(english=english)
            except Exception:  # noqa: BLE001 - programs are written so
                return first

    error = {"error": {"message": "no memory", "type": "t", "param": None, "code": None}}
    run.answer = lambda asked: (500, error) if asked.tag("call") == "1" and member_index(asked) == 0 else GOOD
    grpo = optimizer()
    grpo.compile(Careless(), trainset=examples(2))
    for number, members in by_member(run.requests[1].groups).items():
        found = {(it.reward, it.failure) for it in members}
        assert found == ({(None, "lost: HTTP 500")} if number == 0 else {(7.0, None)})
    assert grpo.report.outcomes == {"lost": 2, "scored": 6}


def test_an_endpoint_that_answers_nothing_fails_the_training(run: SmallRun) -> None:
    error = {"error": {"message": "engine gone", "type": "t", "param": None, "code": None}}
    run.answer = lambda asked: (500, error)
    with pytest.raises(EndpointLost, match=r"None of the step's 8 rollouts(.|\n)*engine gone"):
        optimizer().compile(program(), trainset=examples(2))


def test_steps_with_nothing_to_train_on_stop_the_training_by_name(run: SmallRun) -> None:
    class Silent(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = dspy.Predict("english -> french")

        def forward(self, english: str) -> dspy.Prediction:
            return dspy.Prediction(french="")

    grpo = optimizer(num_train_steps=10)
    with pytest.raises(
        TrainingFailed, match=r"^Nothing could be trained in 3 steps in a row\nno rollout called the policy"
    ):
        grpo.compile(Silent(), trainset=examples(2))
    assert not run.requests


@pytest.mark.parametrize("valset", [0, 3, 1], ids=["first step", "validation", "one example"])
def test_n03_a_program_that_always_raises_ends_at_once_with_its_exception_and_where(
    run: SmallRun, capfd: pytest.CaptureFixture[str], valset: int
) -> None:
    class Broken(Chain):
        def forward(self, english: str) -> dspy.Prediction:
            self.last("")
            return super().forward(english)

    def refuse(french: str) -> None:
        raise ZeroDivisionError("as programs do")

    run.answer = chain_answer
    grpo = optimizer(num_train_steps=10)
    with pytest.raises(TrainingFailed) as failed:
        grpo.compile(Broken(refuse), trainset=examples(4), valset=examples(valset))
    fails = "evaluation's 3 runs" if valset == 3 else "8 rollouts of its first step"
    assert re.search(
        rf"every one of the {fails}\n"
        r"ZeroDivisionError: as programs do \(tests/unit/test_client_grpo\.py:\d+ in refuse\)",
        str(failed.value),
    )
    assert not run.asked
    said = capfd.readouterr().err
    assert "parsed" not in said.partition("validation crashed")[2] and ("score 0" in said) == (valset == 1)


def test_n03_a_program_that_raises_over_each_answer_of_a_validation_ends_at_its_first_step(
    run: SmallRun,
) -> None:
    run.answer = chain_answer
    with pytest.raises(TrainingFailed, match=r"8 rollouts of its first step\nValueError: invalid literal"):
        optimizer(num_train_steps=10).compile(Chain(whole), trainset=examples(4), valset=examples(3))
    assert len(run.asked) == 3 + 8


@pytest.mark.process
def test_n03_a_policy_whose_greedy_answers_are_no_numbers_is_trained_and_scores_nothing(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = greedy_wrong
    grpo = optimizer(num_train_steps=2)
    grpo.compile(Chain(whole), trainset=examples(4), valset=examples(3))
    assert grpo.report.outcomes == {"scored": 16}
    assert next(it["score"] for it in grpo.history if it["kind"] == "validation") == 0.0
    capfd.readouterr()
    found = evaluate(Chain(whole), examples(3), length, model="base")
    assert (found.score, found.outcomes) == (0.0, {"crashed": 3})
    said = capfd.readouterr().err
    assert re.search(r"score 0 · crashed 3 of 3 · ValueError: .*'bonjour' \(tests/.* in whole\)\n", said)


@pytest.mark.process
def test_n03_one_validation_that_crashes_after_a_step_ends_no_training(run: SmallRun) -> None:
    class Flaky(Chain):
        def forward(self, english: str) -> dspy.Prediction:
            if run.version == 1 and english.startswith("held"):
                raise ConnectionError("the program's own database was away")
            return super().forward(english)

    run.answer = chain_answer
    grpo = optimizer(num_train_steps=3, num_steps_for_val=1)
    held = [dspy.Example(english=f"held {i}").with_inputs("english") for i in range(3)]
    grpo.compile(Flaky(), trainset=examples(4), valset=held)
    found = [it["outcomes"] for it in grpo.history if it["kind"] == "validation"]
    assert found == [{"scored": 3}, {"crashed": 3}, {"scored": 3}, {"scored": 3}]


@pytest.mark.parametrize("fault", ["answers that do not parse", "too long a prompt"])
def test_n03_what_a_program_makes_of_the_policys_fault_is_no_fault_of_the_program(
    run: SmallRun, fault: str
) -> None:
    class Wrapping(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = dspy.Predict("english -> french")

        def forward(self, english: str) -> dspy.Prediction:
            try:
                return self.ask(english=english)
            except Exception as error:
                raise RuntimeError("no answer") from error

    error = {
        "message": "maximum context length is 8 tokens",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    run.answer = lambda asked: BAD if fault.startswith("answers") else (400, {"error": error})
    grpo = optimizer(num_train_steps=10)
    with pytest.raises(TrainingFailed, match="3 steps in a row"):
        grpo.compile(Wrapping(), trainset=examples(4), valset=examples(3))
    assert grpo.report.outcomes == {"crashed": 24}


@pytest.mark.process
def test_n03_after_a_step_that_ran_through_three_that_crash_end_the_training(run: SmallRun) -> None:
    def refuse(french: str) -> None:
        if run.version:
            raise ZeroDivisionError("as programs do")

    run.answer = chain_answer
    grpo = optimizer(num_train_steps=10)
    with pytest.raises(TrainingFailed, match=r"3 steps in a row\nZeroDivisionError: as programs do"):
        grpo.compile(Chain(refuse), trainset=examples(4))
    assert grpo.report.outcomes == {"scored": 8, "crashed": 24}


def test_n03_in_a_validation_what_crashed_has_not_parsed_and_is_said_with_its_reason(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(french: str) -> None:
        if french == "raise":
            raise ZeroDivisionError("as programs do")

    run.answer = lambda asked: (
        answering(french="raise") if re.search(r"word [1-9]", asked.user) else chain_answer
    )(asked)
    found = evaluate(Chain(refuse), examples(4), length)
    assert (found.parse_rate, found.outcomes) == (0.25, {"scored": 1, "crashed": 3})
    optimizer().compile(Chain(refuse), trainset=examples(1), valset=examples(4))
    said = capfd.readouterr().err
    assert "crashed 3 · parsed 25%" in said
    assert said.count("a run of the validation crashed: ZeroDivisionError: as programs do (tests/") == 1
    evaluate(Chain(refuse), examples(4)[1:], length)
    assert "score 0 · crashed 3 of 3 · ZeroDivisionError: as programs do (tests/" in capfd.readouterr().err


def test_a_metric_may_judge_each_predictor_by_itself(run: SmallRun) -> None:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> dspy.Prediction:
        return dspy.Prediction(score=0.5, predictor_scores={"first": 0.9, "second": 0.1})

    run.answer = chain_answer
    optimizer(metric).compile(Chain(), trainset=examples(2))
    rewards = {group.predictor: {it.reward for it in group.members} for group in run.requests[1].groups}
    assert rewards == {"first": {0.9}, "second": {0.1}}


def test_a_judge_that_asks_the_policy_is_no_part_of_the_rollout(run: SmallRun) -> None:
    judge = dspy.Predict("english -> french")
    judge.set_lm(PolicyLM(run.session()))

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        return float(len(judge(english="is it good?").french))

    grpo = optimizer(metric)
    grpo.compile(program(), trainset=examples(2))
    assert sum(it.tag("rollout") is None for it in run.asked) == 8
    assert grpo.report.calls_outside_rollouts == 0
    assert grpo.report.trained == grpo.report.samples == 8


# ----------------------------------------------------------------- which predictors


def test_a_predictor_that_asks_another_model_is_left_alone(run: SmallRun) -> None:
    other = dspy.utils.DummyLM([{"english": "hi"}] * 50)
    student = Chain()
    student.first.lm, student.second.lm = PolicyLM(run.session()), other
    optimizer().compile(student, trainset=examples(2))
    assert student.second.lm is other
    assert {it.predictor for it in run.requests[1].groups} == {"first"}


def test_the_configured_lm_is_trained_and_a_program_without_the_policy_refused(run: SmallRun) -> None:
    with dspy.context(lm=PolicyLM(run.session(), max_tokens=11)):
        optimizer().compile(program(), trainset=examples(2))
    assert {it.body["max_tokens"] for it in run.asked} == {11}
    with dspy.context(lm=dspy.utils.DummyLM([])), pytest.raises(ValueError, match="nothing would be trained"):
        optimizer().compile(program(), trainset=examples(2))


def test_a_plain_lm_that_points_at_the_run_is_trained(run: SmallRun) -> None:
    student = program()
    student.set_lm(dspy.LM("openai/policy", api_base=run.base_url, api_key=TOKEN, max_tokens=13))
    optimizer().compile(student, trainset=examples(2))
    assert isinstance(student.lm, PolicyLM)
    assert {it.body["max_tokens"] for it in run.asked} == {13}


def test_demos_are_part_of_the_prompt_that_is_trained(run: SmallRun) -> None:
    student = program()
    student.demos = [dspy.Example(english="cat", french="chat")]
    optimizer().compile(student, trainset=examples(2))
    assert [it["role"] for it in run.asked[0].body["messages"]] == ["system", "user", "assistant", "user"]


def test_the_compiled_programs_lm_is_named_by_version(run: SmallRun) -> None:
    student = program()
    optimizer(num_train_steps=2).compile(student, trainset=examples(2))
    assert student.lm.model == run.name_of(2)
    optimizer(num_train_steps=1).compile(student, trainset=examples(2))
    assert run.asked[-1].body["model"] == "policy"  # training follows the newest version again
    assert student.lm.model == run.name_of(3)


# ----------------------------------------------------------------- validation and checkpoints


def scores_by_version(scores: dict[int, str]) -> Callable[[SmallRun], Callable[[Asked], str]]:
    """An answer whose length depends on the version that gives it."""
    return lambda run: lambda asked: answering(french=scores[run.version])(asked)


@pytest.mark.process
def test_c48_validation_is_greedy_and_marked_as_evaluation(run: SmallRun) -> None:
    grpo = optimizer(num_train_steps=3, num_steps_for_val=2)
    grpo.compile(program(), trainset=examples(4), valset=examples(6))
    evaluations = [it for it in run.asked if it.tag("purpose") == "eval"]
    assert len(evaluations) == 3 * 6  # before, after 2, after 3
    assert {it.body["temperature"] for it in evaluations} == {0.0}
    assert [it["step"] for it in grpo.history if it["kind"] == "validation"] == [0, 2, 3]
    groups = [group for request in run.requests.values() for group in request.groups]
    rewarded = {it.rollout for group in groups for it in group.members}
    assert not rewarded & {it.tag("rollout") for it in evaluations}


@pytest.mark.process
def test_the_best_validated_checkpoint_is_pinned_and_served_at_the_end(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    run.answer = scores_by_version({0: "a", 1: "aaa", 2: "aa", 3: "a"})(run)
    grpo = optimizer(num_train_steps=3, num_steps_for_val=1, checkpoint="single-best")
    grpo.compile(program(), trainset=examples(4), valset=examples(3))
    assert (run.pinned, run.restored) == (["step-000001"], ["step-000001"])
    assert (grpo.summary["before"], grpo.summary["best"], grpo.summary["after"]) == (1.0, 3.0, 1.0)
    assert (grpo.summary["restored"], grpo.summary["version"]) == ("step-000001", 4)
    begin_life(monkeypatch, 4)  # a program started again after that neither trains nor goes back once more
    again = optimizer(num_train_steps=3, num_steps_for_val=1, checkpoint="single-best")
    again.compile(program(), trainset=examples(4), valset=examples(3))
    assert (len(run.requests), len(run.restored)) == (3, 1)


def test_the_last_policy_stays_when_it_is_the_best(run: SmallRun) -> None:
    run.answer = scores_by_version({0: "a", 1: "aa", 2: "aaa"})(run)
    grpo = optimizer(num_train_steps=2, num_steps_for_val=1, checkpoint="improvements")
    grpo.compile(program(), trainset=examples(4), valset=examples(3))
    assert (run.pinned, run.restored) == (["step-000001", "step-000002"], [])


def test_the_trainset_can_be_the_valset(run: SmallRun) -> None:
    optimizer(use_train_as_val=True).compile(program(), trainset=examples(3))
    assert sum(it.tag("purpose") == "eval" for it in run.asked) == 2 * 3


def test_an_evaluation_counts_failures_and_leaves_out_what_has_no_score(run: SmallRun) -> None:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
        return None if example.english == "word 3" else 4.0

    run.answer = lambda asked: BAD if "word 0" in asked.user else GOOD
    found = evaluate(program(), examples(4), metric)
    assert found.score == pytest.approx((0 + 4 + 4) / 3)
    assert found.parse_rate == 0.75
    assert found.outcomes == {"unparsed": 1, "scored": 2, "unscored": 1}
    assert found.version == 0


# ----------------------------------------------------------------- place and records


def test_each_epoch_takes_every_example_once_and_the_seed_decides_the_order(run: SmallRun) -> None:
    def words() -> list[str]:
        run.asked.clear()
        optimizer(num_train_steps=4).compile(program(), trainset=examples(4))
        return [it.user.split("\n")[1] for it in run.asked if member_index(it) == 0]

    first = words()
    assert Counter(first[:4]) == Counter(first[4:]) == Counter(f"word {i}" for i in range(4))


@pytest.mark.process
def test_a_killed_program_resumes_at_its_step_with_the_examples_it_would_have_had(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def groups() -> list[list[str]]:
        return [[it.id.partition("/")[2] for it in request.groups] for request in run.requests.values()]

    trainset, valset = examples(6), examples(2)
    settings: dict[str, Any] = {"num_train_steps": 5, "num_steps_for_val": 2, "seed": 4}
    begin_life(monkeypatch)
    optimizer(**settings).compile(program(), trainset=trainset, valset=valset)
    whole, asked = groups(), [it.body["seed"] for it in run.asked if "seed" in it.body]

    run.steps.clear(), run.requests.clear(), run.asked.clear()
    run.client_state, run.version = None, 0
    begin_life(monkeypatch)
    killed = optimizer(**settings)
    run.answer = lambda asked: _stop_after(run, 3)
    with pytest.raises(EndpointLost):
        killed.compile(program(), trainset=trainset, valset=valset)
    assert run.client_state is not None and run.client_state["step"] == 3

    run.answer = lambda asked: GOOD
    begin_life(monkeypatch, 3)
    resumed = optimizer(**settings)
    resumed.compile(program(), trainset=trainset, valset=valset)
    assert groups() == whole
    assert Counter(it.body["seed"] for it in run.asked if "seed" in it.body) >= Counter(asked)
    assert [it["step"] for it in resumed.history if it["kind"] == "step"] == [4, 5]
    # The validation after step 2 rode on step 3.
    assert [it["step"] for it in resumed.history if it["kind"] == "validation"] == [4, 5]
    assert resumed.summary["before"] == 7.0


def _stop_after(run: SmallRun, steps: int) -> Any:
    error = {"error": {"message": "killed", "type": "t", "param": None, "code": None}}
    return (500, error) if len(run.requests) >= steps else GOOD


def test_a_finished_optimizer_of_a_restarted_program_trains_nothing_again(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    optimizer(num_train_steps=2).compile(program(), trainset=examples(2))
    optimizer(num_train_steps=2, seed=1).compile(program(), trainset=examples(2))
    assert len(run.requests) == 4
    begin_life(monkeypatch, 4)  # it runs both again
    optimizer(num_train_steps=2).compile(program(), trainset=examples(2))
    optimizer(num_train_steps=2, seed=1).compile(program(), trainset=examples(2))
    assert len(run.requests) == 4


def test_everything_is_written_down_in_the_runs_folder(run: SmallRun, tmp_path: Path) -> None:
    grpo = optimizer(num_train_steps=2, num_steps_for_val=1)
    grpo.compile(program(), trainset=examples(4), valset=examples(2))
    written = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    assert [(it["kind"], it["step"]) for it in written] == [
        ("compile", 0),
        ("validation", 0),
        ("step", 1),
        ("validation", 1),
        ("step", 2),
        ("validation", 2),
    ]
    assert [it["kind"] for it in grpo.history] == [it["kind"] for it in written[1:]]
    assert list(written[2]) == [*STEP_KEYS, "steps", "program_started", "time"]
    assert list(grpo.history[1]) == [it for it in STEP_KEYS if it != "compile"]
    report = grpo.summary["report"]
    assert (
        report["trained"] + sum(report["dropped"].values()) == report["samples"] == report["rollouts"] == 16
    )
    json.dumps(grpo.summary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rollouts_per_grpo_step": 1}, "at least 2"),
        ({"format_failure_score": 0.0}, "below failure_score"),
        ({"checkpoint": "every"}, "single-best"),
        ({"staleness": -1}, "at least 0"),
        ({"train_kwargs": {"top_p": 0.9}}, "a different distribution"),
        ({"train_kwargs": {"temperature": 0}}, "above 0"),
        ({"num_train_steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer(**changes)


def test_a_setting_that_is_changed_on_the_optimizer_is_checked_and_taken(run: SmallRun) -> None:
    grpo = optimizer(num_train_steps=5)
    grpo.num_train_steps = 0
    with pytest.raises(ValueError, match="num_train_steps must be at least 1"):
        grpo.compile(program(), trainset=examples(2))
    assert not run.asked
    grpo.num_train_steps = 2
    grpo.compile(program(), trainset=examples(2))
    assert len(run.requests) == 2


@pytest.mark.process
def test_a_metric_of_the_wrong_shape_is_refused_before_anything_is_asked(run: SmallRun) -> None:
    with pytest.raises(TypeError, match="must take"):
        optimizer(lambda prediction: 1.0).compile(program(), trainset=examples(2))
    assert not run.asked
