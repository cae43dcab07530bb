"""What another model or a judge fails is counted by its name and left out: it is nobody's reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, TrainingFailed, evaluate
from tests.support import abuses as a
from tests.support.small_run import TOKEN, Asked, SmallRun, answering

pytestmark = pytest.mark.usefixtures("warm")

BUSY = (429, {"error": {"message": "slow down", "type": "t", "param": None, "code": "rate_limited"}})


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    """Somebody else's endpoint, which is busy where the answer it is asked about is the shortest."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # no prices from the network
    other = SmallRun(answer=lambda asked: BUSY if _about_the_shortest(asked) else good(asked))
    yield other
    other.close()


good = answering(english="hi", verdict="yes")


def _about_the_shortest(asked: Asked) -> bool:
    return "mot\n" in asked.user


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = a.varied
    return run


def other_lm(outside: SmallRun) -> dspy.LM:
    settings: dict[str, Any] = {"cache": False, "num_retries": 0}
    return dspy.LM("openai/judge-1", api_base=outside.base_url, api_key=TOKEN, **settings)


def examples() -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(2)]


def optimizer(metric: Callable[..., Any] = a.length, **changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": 1,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
    }
    return GRPO(metric, **{**settings, **changes})


class Forgiving(a.Two):
    """`second` asks another model; what it raises is swallowed."""

    def __init__(self, lm: dspy.LM) -> None:
        super().__init__()
        self.first.lm, self.second.lm = PolicyLM(), lm

    def forward(self, english: str) -> dspy.Prediction:
        french = self.first(english=english).french
        try:
            back = self.second(french=french).english
        except Exception:  # noqa: BLE001 - programs are written so
            back = ""
        return dspy.Prediction(french=french, back=back)


def judged_by(lm: dspy.LM) -> Callable[..., float]:
    """A metric that asks a judge, and calls it 0 where that fails."""
    judge = dspy.Predict("french -> verdict")
    judge.lm = lm

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        try:
            return float(judge(french=prediction.french).verdict == "yes") + len(prediction.french)
        except Exception:  # noqa: BLE001 - metrics are written so
            return 0.0

    return metric


def rewards_of(run: SmallRun) -> set[float | None]:
    return {it.reward for group in run.requests[1].groups for it in group.members}


def failures_of(run: SmallRun) -> set[str | None]:
    return {it.failure for group in run.requests[1].groups for it in group.members}


def test_c22_a_run_that_another_model_failed_is_excluded_though_the_program_swallows_it(
    run: SmallRun, outside: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    grpo = optimizer()
    grpo.compile(Forgiving(other_lm(outside)), trainset=examples())
    assert rewards_of(run) == {None, 4.0, 5.0, 6.0}
    assert failures_of(run) == {None, "outside: openai/judge-1 failed"}
    assert grpo.report.outcomes == {"outside": 2, "scored": 6}
    assert grpo.summary["report"]["outside"] == {"openai/judge-1": 2}
    assert "a rollout ended outside: openai/judge-1 failed: LM" in capfd.readouterr().err


def test_c22_an_answer_of_another_model_that_does_not_parse_is_not_the_policys(
    run: SmallRun, outside: SmallRun
) -> None:
    outside.answer = lambda asked: a.BAD if _about_the_shortest(asked) else good(asked)
    program = a.Two()
    program.first.lm, program.second.lm = PolicyLM(), other_lm(outside)
    grpo = optimizer()
    grpo.compile(program, trainset=examples())
    assert rewards_of(run) == {None, 4.0, 5.0, 6.0}
    assert grpo.report.outcomes == {"outside": 2, "scored": 6}


def test_c22_what_a_judge_fails_is_no_reward_though_the_metric_calls_it_zero(
    run: SmallRun, outside: SmallRun
) -> None:
    grpo = optimizer(judged_by(other_lm(outside)))
    grpo.compile(a.predict(), trainset=examples())
    assert rewards_of(run) == {None, 5.0, 6.0, 7.0}
    assert grpo.report.outside == {"openai/judge-1": 2}


def test_c22_a_judge_that_is_the_policy_or_the_base_counts_as_a_judge(run: SmallRun) -> None:
    """Its failures are known by what asks: the metric, not the rollout."""
    for name, model in (("policy", None), ("base", "base")):
        run.answer = lambda asked: BUSY_500 if asked.tag("rollout") is None else a.varied(asked)
        run.requests.clear()
        grpo = optimizer(judged_by(PolicyLM(run.session(), model=model)))
        with pytest.raises(TrainingFailed, match=rf"Nothing was trained(.|\n)*{name} 8 times"):
            grpo.compile(a.predict(), trainset=examples())
        assert grpo.report.outcomes == {"outside": 8}


BUSY_500 = (500, BUSY[1])


def test_an_attempt_that_an_adapter_repeats_with_success_is_no_failure(
    run: SmallRun, outside: SmallRun
) -> None:
    """A judge whose answer parses at the second try, as JSON."""
    outside.answer = lambda asked: '{"verdict": "yes"}' if "JSON" in str(asked.body["messages"]) else "yes"
    grpo = optimizer(judged_by(other_lm(outside)))
    grpo.compile(a.predict(), trainset=examples())
    assert len(outside.posted) == 16
    assert grpo.report.outcomes == {"scored": 8}


def test_c22_a_validation_leaves_out_what_others_failed(run: SmallRun, outside: SmallRun) -> None:
    run.answer = lambda asked: answering(french="mot" if "word 0" in asked.user else "motx")(asked)
    found = evaluate(Forgiving(other_lm(outside)), examples(), a.length)
    assert (found.outcomes, found.score, found.scores) == ({"outside": 1, "scored": 1}, 4.0, [None, 4.0])


@pytest.mark.process
def test_c47_failing_judges_are_an_alarm(run: SmallRun, outside: SmallRun) -> None:
    grpo = optimizer(judged_by(other_lm(outside)), num_train_steps=3)
    grpo.compile(a.predict(), trainset=examples())
    assert "outside" in grpo.report.alarms
    (text,) = [it["text"] for it in grpo.history if it["kind"] == "alarm" and it["name"] == "outside"]
    assert text.startswith(
        "another model or a judge failed in 25% of the rollouts, which are left out, not scored: "
        "openai/judge-1 failed: LM"
    )


@pytest.mark.process
def test_steps_that_others_failed_altogether_end_the_training_by_their_names(
    run: SmallRun, outside: SmallRun
) -> None:
    outside.answer = lambda asked: BUSY
    grpo = optimizer(num_train_steps=9)
    with pytest.raises(
        TrainingFailed, match=r"3 steps in a row(.|\n)*openai/judge-1 24 times; run fewer at once"
    ):
        grpo.compile(Forgiving(other_lm(outside)), trainset=examples())


def test_a_judge_without_an_lm_is_not_answered_by_the_policy(run: SmallRun) -> None:
    """The policy stands in for DSPy's optimizers; that it judges itself must be said by the user."""
    judge = dspy.Predict("french -> verdict")

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        return float(judge(french=prediction.french).verdict == "yes")

    program = a.predict()
    program.set_lm(PolicyLM(run.session()))
    with pytest.raises(TrainingFailed, match="No LM is loaded"):
        optimizer(metric, num_train_steps=9).compile(program, trainset=examples())
