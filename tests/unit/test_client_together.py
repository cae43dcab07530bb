"""DSPy's optimizers of prompts and of weights, one after the other on one policy (A15, A16).

What a candidate was scored with is what it answers with at the end: the played policy answers by its version
and by its prompt, so that a candidate which asks another has another score.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import pytest
from dspy.dsp.utils.settings import main_thread_config
from dspy.teleprompt import grpo as dspys

from launcher.client import GRPO, PolicyLM, arbor
from launcher.client.arbor import ArborGRPO, ArborProvider
from tests.support.arbor_names import unused
from tests.support.small_run import TOKEN, Asked, SmallRun, answering

__all__ = ["unused"]

pytestmark = [pytest.mark.usefixtures("warm")]

# What MIPROv2, GEPA and SIMBA ask their models for.
_ADVICE = dict.fromkeys(
    (
        "observations", "summary", "program_description", "module_description", "proposed_instruction",
        "new_instruction", "discussion",
    ),
    "Translate it well.",
) | {"module_advice": '{"self": "Translate it well."}'}  # fmt: skip
ANSWERS = ("cat", "dog")


def good(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None, *gepas: Any) -> float:
    return float(prediction.french == example.french)


def examples(count: int = 16) -> list[dspy.Example]:
    return [
        dspy.Example(english=f"word {i}", french=ANSWERS[i % len(ANSWERS)]).with_inputs("english")
        for i in range(count)
    ]


@pytest.fixture
def run(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    monkeypatch.setitem(main_thread_config, "lm", None)

    def by_version_and_prompt(asked: Asked) -> str:
        """Greedy answers depend on these alone; sampled ones on how many were asked before, too."""
        version = run.version_of(asked.body["model"])
        said = [run.machine, version, asked.body["messages"]]
        if asked.body.get("temperature"):
            said.append(len(run.asked))
        number = int(hashlib.sha256(json.dumps(said).encode()).hexdigest(), 16)
        return answering(french=ANSWERS[number % len(ANSWERS)], **_ADVICE)(asked)

    run.answer = by_version_and_prompt
    return run


def student(run: SmallRun) -> Any:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), temperature=0.0))
    return program


def sampled(run: SmallRun) -> Any:
    """As DSPy's own GRPO needs it, whose rollouts are the LM's own."""
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session()))
    return program


def ours() -> Any:
    settings = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 3, "checkpoint": "none"}
    return GRPO(good, num_train_steps=2, **settings)  # type: ignore[arg-type]


def dspys_own() -> Any:
    return dspys.GRPO(
        metric=good, exclude_demos=True, num_train_steps=2, num_threads=2, train_kwargs={"temperature": 1.0},
        num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=3,
    )  # fmt: skip


def imitation() -> Any:
    return dspy.BootstrapFinetune(metric=good, train_kwargs={"num_train_epochs": 1})


WEIGHTS = {"GRPO": ours, "DSPy's GRPO": dspys_own, "BootstrapFinetune": imitation}


def score(program: dspy.Module, data: list[dspy.Example]) -> float:
    return dspy.Evaluate(devset=data, metric=good, num_threads=2)(program).score


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["w", "p -> w", "w -> p", "p -> w -> p"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a15_each_candidate_of_better_together_is_worth_at_the_end_what_was_recorded(
    run: SmallRun, weights: str, strategy: str
) -> None:
    few_shot = dspy.BootstrapFewShot(metric=good, max_bootstrapped_demos=1, max_labeled_demos=1, max_errors=1)
    together = dspy.BetterTogether(metric=good, p=few_shot, w=WEIGHTS[weights]())
    run.meaning = {"sampling": {"temperature": 1.0}}
    best: Any = together.compile(student(run), trainset=examples(), valset=examples(), strategy=strategy)
    assert not best.flag_compilation_error_occurred
    assert run.requests, "its weights were trained"
    for candidate in best.candidate_programs:
        program, recorded = candidate["program"], candidate["score"]
        assert score(program, examples()) == recorded, (candidate["strategy"], program.lm.model)
    names = {it["strategy"]: it["program"].lm.model for it in best.candidate_programs}
    assert names[""] == "policy@v0"
    trained = [names[it] for it in names if "w" in it]
    assert trained and all(it != "policy" and it != "policy@v0" for it in trained)


def arbors_student(run: SmallRun) -> Any:
    """As Arbor's README makes it: a plain LM with Arbor's provider."""
    program = dspy.Predict("english -> french")
    address = arbor.init(silent=True)["base_url"]
    name = f"openai/arbor:{run.hub_name}"
    program.set_lm(
        dspy.LM(name, provider=ArborProvider(), api_base=address, api_key="arbor", temperature=0.0)
    )
    return program


def arbors() -> Any:
    settings = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 3, "checkpoint": "none"}
    return ArborGRPO(good, exclude_demos=True, num_train_steps=2, **settings)


@pytest.mark.process
@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("weights", [arbors, ours, imitation])
def test_s07_candidates_with_arbors_lm_are_worth_at_the_end_what_was_recorded(
    run: SmallRun, weights: Callable[[], Any]
) -> None:
    few_shot = dspy.BootstrapFewShot(metric=good, max_bootstrapped_demos=1, max_labeled_demos=1, max_errors=1)
    before = arbors_student(run)
    users_lm = before.lm
    together = dspy.BetterTogether(metric=good, p=few_shot, w=weights())
    with dspy.context(lm=users_lm):  # for the optimizers of prompts, which drop a program's own
        best: Any = together.compile(before, trainset=examples(), valset=examples(), strategy="p -> w -> p")
    assert not best.flag_compilation_error_occurred
    assert run.requests, "its weights were trained"
    for candidate in best.candidate_programs:
        program, recorded = candidate["program"], candidate["score"]
        assert score(program, examples()) == recorded, (candidate["strategy"], program.lm.model)
    names = {it["strategy"]: it["program"].lm.model for it in best.candidate_programs}
    assert names[""] == names["p"] == "openai/policy@v0"
    assert users_lm.model == f"openai/arbor:{run.hub_name}", "an LM that the user made means the newest"


def mipro() -> tuple[Any, dict[str, Any]]:
    optimizer = dspy.MIPROv2(metric=good, auto=None, num_candidates=2, num_threads=1, verbose=False)
    return optimizer, {"num_trials": 2, "minibatch": False, "valset": examples()}


def simba() -> tuple[Any, dict[str, Any]]:
    return dspy.SIMBA(metric=good, bsize=4, num_candidates=2, max_steps=1, num_threads=2), {"seed": 1}


def gepa() -> tuple[Any, dict[str, Any]]:
    """Its prompts are written by another model, at an address of its own."""
    writer = SmallRun(answer=lambda asked: "```\nTranslate it well.\n```")
    _writers.append(writer)
    reflection = dspy.LM("openai/writer", api_base=writer.base_url, api_key=TOKEN, cache=False)
    optimizer = dspy.GEPA(
        metric=good, max_metric_calls=60, reflection_lm=reflection, num_threads=1, track_stats=True
    )
    return optimizer, {"valset": examples()}


_writers: list[SmallRun] = []


@pytest.fixture
def writers() -> Iterator[list[SmallRun]]:
    """Endpoints of other models that a test began."""
    yield _writers
    while _writers:
        _writers.pop().close()


def bootstrap_rs() -> tuple[Any, dict[str, Any]]:
    optimizer = dspy.BootstrapFewShotWithRandomSearch(
        metric=good, max_bootstrapped_demos=1, max_labeled_demos=1, num_candidate_programs=2, num_threads=2
    )
    return optimizer, {"valset": examples()}


@pytest.mark.process
@pytest.mark.parametrize("make", [mipro, simba, gepa, bootstrap_rs])
def test_a16_what_a_prompt_optimizer_scores_on_the_policy_is_what_it_returns(
    run: SmallRun, make: Callable[[], tuple[Any, dict[str, Any]]], writers: list[SmallRun]
) -> None:
    before = student(run)
    optimizer, settings = make()
    program: Any = optimizer.compile(before, trainset=examples(), **settings)
    if program.lm is None:  # DSPy drops it; BetterTogether gives it back
        program.set_lm(before.lm)
    assert {it.tag("purpose") for it in run.asked} == {"eval"}, "none of it is training material"
    assert all(it.asked for it in writers) and bool(writers) == (make is gepa)
    scores = found(program)
    assert score(program, examples()) == pytest.approx(max(scores), abs=0.01)
    trained = imitation().compile(program, trainset=examples())
    assert trained.lm.model == run.name_of(max(run.steps))


def found(program: Any) -> list[float]:
    """The scores on all examples that an optimizer kept with what it returns, in per cent."""
    if (results := getattr(program, "detailed_results", None)) is not None:  # GEPA's
        return [100 * it for it in results.val_aggregate_scores]
    scores = [it["score"] for it in program.candidate_programs if it.get("score") is not None]
    return [100 * it for it in scores] if hasattr(program, "trial_logs") and max(scores) <= 1 else scores
