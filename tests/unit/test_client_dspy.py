"""DSPy's own optimizers and listeners on the run's policy, before and beside our optimizer."""

from __future__ import annotations

import asyncio
import threading
import tomllib
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.dsp.utils.settings import main_thread_config
from dspy.streaming import StreamListener, StreamResponse

from launcher.client import GRPO, PolicyLM, TrainingFailed, evaluate
from launcher.client.dspy import default_lm_fallback
from launcher.client.dspy.rollouts import DEFAULT_CONCURRENCY, RolloutLimits
from tests.support import abuses as a
from tests.support.small_run import CUT_OFF, Asked, SmallRun, answering

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def run(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    run.answer = a.varied
    monkeypatch.setitem(main_thread_config, "lm", None)
    default_lm_fallback._logged.clear()
    return run


def examples(count: int = 2) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(count)]


def optimizer(**changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": 1,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
    }
    return GRPO(a.length, **{**settings, **changes})


def with_lm(run: SmallRun, **settings: Any) -> Any:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), **settings))
    return program


def few_shot(**settings: Any) -> dspy.BootstrapFewShot:
    return dspy.BootstrapFewShot(metric=a.length, max_bootstrapped_demos=1, max_labeled_demos=1, **settings)


# ----------------------------------------------------------------- the LM that was lost


def test_a_prompt_optimizer_works_with_set_lm_alone_and_the_policys_settings_are_kept(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    program = few_shot().compile(with_lm(run, max_tokens=17), trainset=examples())
    assert program.lm is None, "DSPy drops it"
    assert run.asked, "the run's policy stood in"
    said = capfd.readouterr().err
    assert said.count("slipway: DSPy has no LM configured, so this run's policy answers") == 1

    optimizer().compile(program, trainset=examples())
    assert {it.body["max_tokens"] for it in run.asked} == {17}
    assert (
        "self: no LM of its own, so it uses the policy as the first LM of the policy in this program does "
        "(max_tokens=17)"
    ) in capfd.readouterr().err


def test_default_settings_are_said_where_there_are_no_others(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer().compile(a.predict(), trainset=examples())
    assert "self: no LM of its own, so it uses the policy with default settings" in capfd.readouterr().err


def test_what_the_user_configures_goes_before_the_policy(run: SmallRun) -> None:
    other = dspy.utils.DummyLM([{"french": "oui"}] * 3)
    with dspy.context(lm=other):
        with_lm(run)
        assert dspy.Predict("english -> french")(english="hi").french == "oui"
    assert not run.asked


def test_a_policy_of_a_run_that_is_over_stands_in_no_longer(run: SmallRun) -> None:
    ended = SmallRun()
    PolicyLM(ended.session())
    ended.close()
    few_shot().compile(with_lm(run, max_tokens=17), trainset=examples())
    assert {it.body["max_tokens"] for it in run.asked} == {17}


@pytest.mark.slow
def test_better_together_goes_from_prompts_to_weights(run: SmallRun) -> None:
    together = dspy.BetterTogether(metric=a.length, p=few_shot(max_errors=1), w=optimizer())
    data = examples(4)
    program = together.compile(with_lm(run, max_tokens=17), trainset=data, valset=data, strategy="p -> w")
    assert len(run.requests) == 1
    assert not program.flag_compilation_error_occurred
    assert {it["strategy"] for it in program.candidate_programs} == {"", "p", "p -> w"}
    assert {it.body["max_tokens"] for it in run.asked} == {17}


@pytest.mark.slow
def test_mipro_finds_instructions_with_the_policy_alone(run: SmallRun) -> None:
    fields = ("observations", "summary", "program_description", "module_description", "proposed_instruction")
    run.answer = answering(french="mot", **dict.fromkeys(fields, "Translate."))
    student = with_lm(run, max_tokens=17)
    mipro = dspy.MIPROv2(metric=a.length, auto=None, num_candidates=2, num_threads=1, verbose=False)
    program = mipro.compile(student, trainset=examples(4), valset=examples(4), num_trials=1, minibatch=False)
    assert {it.body["max_tokens"] for it in run.asked} == {17}
    assert program.signature.instructions


def test_the_extra_brings_what_mipro_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(it.startswith("optuna") for it in project["optional-dependencies"]["dspy"])


# ----------------------------------------------------------------- listeners


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (dspy.ChatAdapter(), "[[ ## french ## ]]\nl'été est là, enfin\n\n[[ ## completed ## ]]"),
        (dspy.JSONAdapter(), '{"french": "l\'été est là, enfin"}'),
        (dspy.XMLAdapter(), "<french>l'été est là, enfin</french>"),
    ],
    ids=["chat", "json", "xml"],
)
def test_a_stream_listener_reads_the_field_as_it_comes(
    run: SmallRun, adapter: dspy.Adapter, text: str
) -> None:
    run.answer = lambda asked: text

    async def heard() -> list[Any]:
        with dspy.context(adapter=adapter):
            streamed = dspy.streamify(with_lm(run), stream_listeners=[StreamListener("french")])
            return [it async for it in streamed(english="the summer is here")]

    found = asyncio.run(heard())
    pieces = [it.chunk for it in found if isinstance(it, StreamResponse)]
    assert len(pieces) > 3
    assert "".join(pieces).strip(' "') == "l'été est là, enfin"
    (prediction,) = [it for it in found if isinstance(it, dspy.Prediction)]
    assert prediction.french == "l'été est là, enfin"


# ----------------------------------------------------------------- answers that never parse


def never(asked: Asked) -> str:
    return a.BAD + CUT_OFF if a.member(asked) % 2 else a.BAD


def test_g19_s09_a_training_in_which_no_answer_parses_ends_soon_and_says_what_to_try(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer, run.drop_flat = never, True
    grpo = optimizer(num_train_steps=50)
    with pytest.raises(TrainingFailed, match=r"No answer could be parsed in 3 steps in a row\n") as raised:
        grpo.compile(a.predict(), trainset=examples())
    hint = str(raised.value.hint)
    assert "ChatAdapter" in hint and "max_tokens" in hint and "one output field" in hint
    assert "dspy.BootstrapFinetune" in hint, "S9: a base that cannot write the format learns it first"
    assert "50% of the runs were cut off" in hint
    assert len(run.empty) == 3 and not run.requests
    assert capfd.readouterr().err.count("no run had answers that could be parsed; the model") == 1


def test_n07_the_adapter_in_use_is_not_what_to_try(run: SmallRun) -> None:
    run.answer, run.drop_flat = (lambda asked: a.BAD), True
    with pytest.raises(TrainingFailed) as raised:
        optimizer(adapter=dspy.JSONAdapter()).compile(a.predict(), trainset=examples())
    hint = str(raised.value.hint)
    assert "the format of JSONAdapter" in hint and "adapter=dspy.ChatAdapter()" in hint


def test_a_single_step_of_unparsed_answers_fails_with_the_same_hint(run: SmallRun) -> None:
    run.answer, run.drop_flat = (lambda asked: a.BAD), True
    with pytest.raises(TrainingFailed, match=r"Nothing was trained in 1 step(.|\n)*max_tokens"):
        optimizer().compile(a.predict(), trainset=examples())


def test_unparsed_answers_are_said_at_the_first_validation(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = lambda asked: a.BAD if asked.tag("purpose") == "eval" else a.varied(asked)
    optimizer().compile(a.predict(), trainset=examples(), valset=examples())
    lines = capfd.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(lines) if "no run had answers that could be parsed" in line)
    assert first < next(i for i, line in enumerate(lines) if "step 1/1" in line)


@pytest.mark.parametrize(
    ("folder", "instead"),
    [
        ("/home/u/slipway/code/runtime/tiny/model", "launch --model HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/models/tiny", None),
    ],
)
@pytest.mark.parametrize("answers", ["bad", "wrong", "good"])
def test_what_an_embedded_model_knows_is_told_at_the_first_validation(
    run: SmallRun, capfd: pytest.CaptureFixture[str], folder: str, instead: str | None, answers: str
) -> None:
    run.model_path = folder
    said = {"bad": lambda _: a.BAD, "wrong": answering(french="autre"), "good": answering(french="mot")}
    run.answer = lambda asked: (said[answers] if asked.tag("purpose") == "eval" else a.varied)(asked)

    def right(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        return a.length(example, prediction) if trace is not None else float(prediction.french == "mot")

    changes = {"num_train_steps": 2, "num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 4}
    GRPO(right, **changes).compile(a.predict(), trainset=examples(), valset=examples())
    lines = capfd.readouterr().err.splitlines()
    told = [line for line in lines if "ask for more" in line]
    assert len(told) == int(instead is not None and answers != "good")
    assert all(line.endswith(str(instead)) for line in told)


# ----------------------------------------------------------------- how many at once


@pytest.mark.process
def test_all_rollouts_of_a_step_and_of_an_evaluation_are_under_way_at_once(run: SmallRun) -> None:
    """Each answer waits for all the others: fewer at once would never get any."""

    together = threading.Barrier(32)

    def answer(asked: Asked) -> Any:
        try:
            together.wait(30)
        except threading.BrokenBarrierError:
            return 500, {"error": {"message": "alone", "type": "t", "param": None, "code": None}}
        return a.varied(asked)

    run.answer = answer
    optimizer(num_dspy_examples_per_grpo_step=4, num_rollouts_per_grpo_step=8).compile(
        a.predict(), trainset=examples(4)
    )
    assert evaluate(with_lm(run), examples(32), a.length).outcomes == {"scored": 32}


def test_a_large_step_is_bounded_and_a_number_that_is_asked_for_is_kept() -> None:
    assert RolloutLimits().concurrency(10_000) == DEFAULT_CONCURRENCY
    assert RolloutLimits(threads=200).concurrency(10_000) == 200
