"""A version that is named means those weights or an error; `base` is the model before training."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMServerError

from launcher.client import GRPO, PolicyLM, evaluate
from tests.support import abuses as a
from tests.support.small_run import Asked, SmallRun, answering


def examples(count: int = 2) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(count)]


def compiled(lm: PolicyLM, steps: int = 2) -> Any:
    program = dspy.Predict("english -> french")
    program.set_lm(lm)
    settings: dict[str, Any] = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 4}
    return GRPO(a.length, num_train_steps=steps, **settings).compile(program, trainset=examples())


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = by_version
    return run


def by_version(asked: Asked) -> str:
    """The model's name, and something that differs inside a group."""
    return answering(french=asked.body["model"] + "x" * a.member(asked))(asked)


def test_c55_a_compiled_program_names_its_version_whatever_is_trained_after_it(run: SmallRun) -> None:
    lm = PolicyLM(run.session())
    first = compiled(lm)
    second = compiled(lm)
    assert (first.lm.model, second.lm.model) == ("policy@v2", "policy@v4")
    assert first(english="hi").french == "policy@v2"
    found = evaluate(first, examples(), a.length)
    assert (found.version, {it.body["model"] for it in run.asked[-2:]}) == (2, {"policy@v2"})


def test_c55_the_configured_lm_asks_the_newest_whatever_is_compiled_with_it(run: SmallRun) -> None:
    """Other programs ask it too."""
    lm = PolicyLM(run.session())
    with dspy.context(lm=lm):
        program = dspy.Predict("english -> french")
        GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
    assert (program.lm.model, lm.model) == ("policy@v1", "policy")


def test_c55_a_training_goes_on_from_the_newest_whatever_the_program_names(run: SmallRun) -> None:
    program = compiled(PolicyLM(run.session()))
    run.asked.clear()
    GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
    assert {it.body["model"] for it in run.asked} == {"policy"}
    assert program.lm.model == "policy@v3"


def test_c55_an_answer_of_another_version_than_the_named_one_is_an_error(run: SmallRun) -> None:
    program = compiled(PolicyLM(run.session()))
    run.claims = 3
    with pytest.raises(LMServerError, match=r"policy@v2 was asked, and version 3 of the policy answered"):
        program(english="hi")


def test_c55_base_is_the_before_that_an_evaluation_compares_with(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = lambda asked: a.BAD if "word 0" in asked.user else by_version(asked)
    copied = dspy.Predict("english -> french")
    copied.set_lm(PolicyLM(run.session()))
    copied = copied.deepcopy()
    after = compiled(PolicyLM(run.session()))
    assert "the model before any training answers as PolicyLM(model='base')" in capfd.readouterr().err
    before = dspy.Predict("english -> french")
    before.set_lm(PolicyLM(run.session(), model="base"))
    found = evaluate(before, examples(), a.length)
    assert (found.version, found.outcomes) == (0, {"unparsed": 1, "scored": 1})
    assert (found.score, found.parse_rate) == (len("base") / 2, 0.5)
    assert {it.tag("purpose") for it in run.asked[-2:]} == {"eval"}
    assert evaluate(after, examples(), a.length).version == 2
    assert evaluate(copied, examples(), a.length).version == 2, "a copy made before asks the newest"


def test_a_base_that_is_no_part_of_the_policy_cannot_be_trained(run: SmallRun) -> None:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), model="base"))
    with pytest.raises(ValueError, match="nothing would be trained"):
        GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
