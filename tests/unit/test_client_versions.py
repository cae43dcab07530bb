"""A version that is named means those weights or an error; `base` is the model before training."""

from __future__ import annotations

import copy
import pickle
import uuid
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMError, LMServerError

from launcher.client import GRPO, PolicyLM, evaluate
from tests.support import abuses as a
from tests.support.lives import begin_life
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


@pytest.mark.process
def test_c55_a_compiled_program_names_its_version_whatever_is_trained_after_it(run: SmallRun) -> None:
    lm = PolicyLM(run.session())
    first = compiled(lm)
    second = compiled(lm)
    assert (first.lm.model, second.lm.model) == (run.name_of(2), run.name_of(4))
    assert first(english="hi").french == run.name_of(2)
    found = evaluate(first, examples(), a.length)
    assert (found.version, {it.body["model"] for it in run.asked[-2:]}) == (2, {run.name_of(2)})


def test_c55_the_configured_lm_asks_the_newest_whatever_is_compiled_with_it(run: SmallRun) -> None:
    """Other programs ask it too."""
    lm = PolicyLM(run.session())
    with dspy.context(lm=lm):
        program = dspy.Predict("english -> french")
        GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
    assert (program.lm.model, lm.model) == (run.name_of(1), "policy")


@pytest.mark.process
def test_c55_a_training_goes_on_from_the_newest_whatever_the_program_names(run: SmallRun) -> None:
    program = compiled(PolicyLM(run.session()))
    run.asked.clear()
    GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
    assert {it.body["model"] for it in run.asked} == {"policy"}
    assert program.lm.model == run.name_of(3)


def test_c55_an_answer_of_another_version_than_the_named_one_is_an_error(run: SmallRun) -> None:
    program = compiled(PolicyLM(run.session()))
    run.claims = 3
    with pytest.raises(
        LMServerError, match=r"asked for policy@v2\+\w+, but version 3 of the policy answered"
    ):
        program(english="hi")


def test_c55_what_a_program_was_compiled_to_is_kept_for_the_runs_life(run: SmallRun) -> None:
    compiled(PolicyLM(run.session()))
    compiled(PolicyLM(run.session()), steps=1)
    assert run.named == ["step-000002", "step-000003"]


def test_c55_a_number_that_a_lost_machine_gave_out_before_does_not_answer_to_the_name(run: SmallRun) -> None:
    first = compiled(PolicyLM(run.session()))
    run.lose_machine(to_step=1)
    second = compiled(PolicyLM(run.session()), steps=1)
    assert second(english="hi").french == run.name_of(2) != first.lm.model
    with pytest.raises(LMError, match="different weights"):
        first(english="hi")


@pytest.mark.process
def test_c55_an_optimizer_that_had_finished_names_its_weights_after_a_loss_as_well(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains nothing more, so no step tells it the hash; what came after it is not what it made."""
    begin_life(monkeypatch)
    compiled(PolicyLM(run.session()))
    run.lose_machine(to_step=1)
    begin_life(monkeypatch, 1)
    compiled(PolicyLM(run.session()))
    compiled(PolicyLM(run.session()), steps=1)
    begin_life(monkeypatch, 3)
    finished = compiled(PolicyLM(run.session()))
    assert (run.version, finished.lm.model) == (3, run.name_of(2))
    assert finished(english="hi").french == run.name_of(2)


@pytest.mark.process
def test_c55_one_that_had_finished_under_an_older_launch_names_the_newest_by_its_weights(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That launch did not write down what came out: of what is served a number alone could be another's."""
    begin_life(monkeypatch)
    compiled(PolicyLM(run.session()))
    run.lose_machine(to_step=1)
    begin_life(monkeypatch, 1)
    compiled(PolicyLM(run.session()))
    compiled(PolicyLM(run.session()), steps=1)
    assert run.client_state is not None
    del run.client_state["names"]
    begin_life(monkeypatch, 3)
    finished = compiled(PolicyLM(run.session()))
    assert finished.lm.model == run.name_of(3)


def test_what_is_not_kept_at_the_end_is_said_and_its_training_is_not_lost(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.prunes = True
    program = compiled(PolicyLM(run.session()))
    assert program.lm.model == "policy@v2"
    assert "policy@v2 is not kept and no longer answers" in capfd.readouterr().err


def unpickled(written: bytes) -> Any:
    return pickle.loads(written)  # noqa: S301 - written by this very test


@pytest.mark.parametrize("way", [copy.deepcopy, lambda lm: unpickled(pickle.dumps(lm)), PolicyLM.copy])
def test_c55_a_copy_asks_the_version_that_is_named_however_it_is_made(run: SmallRun, way: Any) -> None:
    named, newest = compiled(PolicyLM(run.session())).lm, PolicyLM(run.session())
    base = PolicyLM(run.session(), model="base")
    compiled(PolicyLM(run.session()), steps=1)
    assert [way(lm).model for lm in (named, newest, base)] == [run.name_of(2), "policy", "base"]


def test_a_pickle_of_another_run_asks_the_newest_of_this_one(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = pickle.dumps(compiled(PolicyLM(run.session())).lm)
    monkeypatch.setattr(run, "run_id", "run-2")
    assert unpickled(written).model == "policy"


# ------------------------------------------------------------------ what is cached


def test_c55_what_dspy_has_cached_of_another_run_is_no_answer_of_this_one(run: SmallRun) -> None:
    """DSPy's cache outlives a run, and every run begins at version 0."""
    question, other = uuid.uuid4().hex, SmallRun(run_id="run-2")
    run.answer, other.answer = answering(french="of one"), answering(french="of the other")
    said = [PolicyLM(it.session(), cache=True)(question) for it in (run, run, other, other)]
    assert "of one" in said[0][0] and "of the other" in said[2][0]
    assert (said[1], said[3]) == (said[0], said[2])
    assert (len(run.asked), len(other.asked)) == (1, 1)
    other.close()


def test_c55_what_is_cached_is_of_one_version_and_of_one_way_to_ask(run: SmallRun) -> None:
    question = uuid.uuid4().hex
    run.answer = lambda asked: f"{asked.body['model']} {asked.body.get('min_p')}"
    session, found = run.session(), []
    for extra in ({}, {"min_p": 0.1}, {}):
        found += PolicyLM(session, cache=True, extra_body=extra)(question)
    compiled(PolicyLM(session), steps=1)
    found += PolicyLM(session, cache=True)(question)
    assert found == ["policy@v0 None", "policy@v0 0.1", "policy@v0 None", f"{run.name_of(1)} None"]


def test_c55_the_newest_is_never_answered_from_a_cache(run: SmallRun) -> None:
    lm, question = PolicyLM(run.session()), uuid.uuid4().hex
    for _ in range(2):
        lm(question, cache=True)
    assert len(run.asked) == 2


def test_c55_base_is_the_before_that_an_evaluation_compares_with(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = lambda asked: a.BAD if "word 0" in asked.user else by_version(asked)
    copied = dspy.Predict("english -> french")
    copied.set_lm(PolicyLM(run.session()))
    copied = copied.deepcopy()
    after = compiled(PolicyLM(run.session()))
    assert "the model before training is available as PolicyLM(model='base')" in capfd.readouterr().err
    before = dspy.Predict("english -> french")
    before.set_lm(PolicyLM(run.session(), model="base"))
    found = evaluate(before, examples(), a.length)
    assert (found.version, found.outcomes) == (0, {"unparsed": 1, "scored": 1})
    assert (found.score, found.parse_rate) == (len("base") / 2, 0.5)
    assert {it.tag("purpose") for it in run.asked[-2:]} == {"eval"}
    assert evaluate(after, examples(), a.length).version == 2
    assert evaluate(copied, examples(), a.length).version == 0, "a copy made before asks what it asked"


@pytest.mark.process
def test_c55_a_copy_made_before_a_training_asks_what_it_asked_then(run: SmallRun) -> None:
    """So that what was scored, as BetterTogether does, scores again the same."""
    lm = PolicyLM(run.session())
    program = dspy.Predict("english -> french")
    program.set_lm(lm)
    first = program.deepcopy()
    compiled(PolicyLM(run.session()))
    second, third = program.deepcopy(), copy.deepcopy(first)
    compiled(PolicyLM(run.session()))
    assert [it(english="hi").french for it in (first, second, third, program)] == [
        "policy@v0", run.name_of(2), "policy@v0", "policy",
    ]  # fmt: skip
    assert GRPO(a.length, num_train_steps=1).compile(second, trainset=examples()).lm.model == run.name_of(5)


class Held(dspy.Module):
    """A program that asks with an LM of its own beside its predictor's."""

    def __init__(self, lm: PolicyLM) -> None:
        super().__init__()
        self.answer = dspy.Predict("english -> french")
        self.others = {"own": lm}

    def forward(self, english: str) -> dspy.Prediction:
        """Both."""
        with dspy.context(lm=self.others["own"]):
            dspy.Predict("english -> french")(english=english)
        return self.answer(english=english)


@pytest.mark.process
def test_c55_what_is_trained_asks_the_newest_though_it_is_a_copy(run: SmallRun) -> None:
    program = Held(PolicyLM(run.session()))
    program.set_lm(program.others["own"])
    run.asked.clear()
    GRPO(a.length, num_train_steps=2).compile(program.deepcopy(), trainset=examples())
    assert {it.body["model"] for it in run.asked} == {"policy"}


def test_a_base_that_is_no_part_of_the_policy_cannot_be_trained(run: SmallRun) -> None:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), model="base"))
    with pytest.raises(ValueError, match="nothing would be trained"):
        GRPO(a.length, num_train_steps=1).compile(program, trainset=examples())
