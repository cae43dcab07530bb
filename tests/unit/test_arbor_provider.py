"""Arbor's provider and its LM, asked directly and by DSPy's own loop, against a small endpoint (A9)."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.teleprompt import grpo as dspys

from launcher.client import arbor
from launcher.client.arbor import arbor_provider
from launcher.client.arbor.arbor_provider import ArborProvider
from tests.support.arbor_names import unused
from tests.support.arbor_programs import NEUTRAL, examples, length, lm
from tests.support.small_run import TOKEN, SmallRun, answering

__all__ = ["unused"]

pytestmark = pytest.mark.usefixtures("unused")

CANARY = "sk-users-own-0123456789abcdef0123456789"


@pytest.mark.process  # imports LiteLLM, which takes seconds
@pytest.mark.parametrize("key", [{"api_key": "arbor"}, {}, {"api_key": CANARY}])
def test_a09_asked_directly_the_lm_answers_whatever_its_key_and_no_key_is_sent_but_the_runs(
    key: dict[str, str], run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    asked = lm(run, **key, **NEUTRAL)
    for _ in range(2):  # and no answer from a cache: the weights behind the name change
        assert "bonjour" in asked("hello")[0]
    assert len(run.asked) == 2
    for it in run.asked:
        assert it.headers["authorization"] == f"Bearer {TOKEN}"
        assert it.tag("purpose") == "eval" and CANARY not in json.dumps([it.headers, it.body])
        assert it.body["model"] == f"arbor:{run.hub_name}"


@pytest.mark.process  # imports LiteLLM, which takes seconds
def test_the_runs_key_is_for_the_runs_address_and_arbors_lms_alone(run: SmallRun) -> None:
    elsewhere = SmallRun()
    try:
        arbor.init()
        foreign = dspy.LM(
            "openai/arbor:x", provider=ArborProvider(), api_base=elsewhere.base_url, api_key="arbor",
            num_retries=0,
        )  # fmt: skip
        plain = dspy.LM("openai/policy", api_base=run.base_url, api_key="arbor", num_retries=0)
        for it in (foreign, plain):
            with pytest.raises(Exception, match="wrong token"):
                it("hello")
            assert it.kwargs["api_key"] == "arbor"
    finally:
        elsewhere.close()


def test_s08_a_model_that_the_run_does_not_have_is_named_once_and_not_once_an_example(
    run: SmallRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbor_provider, "_CHECKED", set())
    printed = lm(run, "Qwen/Qwen3-32B", api_key="arbor", num_retries=0)
    for it in (printed, printed, lm(run), lm(run, "policy")):
        with contextlib.suppress(Exception):
            it("hello")
    said = capsys.readouterr().err
    assert said.count("does not train Qwen/Qwen3-32B") == said.count("does not train") == 1
    assert 'use "openai/arbor:policy"' in said


@pytest.mark.process
def test_while_dspys_own_loop_samples_with_the_lm_its_answers_are_not_evaluations(run: SmallRun) -> None:
    asked, job = lm(run), SimpleNamespace(is_over=False)
    asked.grpo_job = job  # as a ReinforceJob does
    asked("hello")
    job.is_over = True
    asked("hello")
    assert [it.tag("purpose") for it in run.asked] == [None, "eval"]


def test_the_provider_starts_and_ends_nothing(run: SmallRun) -> None:
    asked = lm(run, api_key="arbor")
    posted = len(run.posted)
    asked.launch()
    asked.kill()
    assert len(run.posted) == posted
    assert asked.provider.finetunable and asked.provider.reinforceable
    assert type(pickle.loads(pickle.dumps(asked.provider))) is ArborProvider  # noqa: S301 - our own
    assert ArborProvider.is_provider_model(asked.model) and not ArborProvider.is_provider_model(
        "openai/gpt-4"
    )


@pytest.mark.process
def test_dspys_own_grpo_trains_an_lm_of_arbors_as_it_was_written(run: SmallRun) -> None:
    numbers = itertools.count()
    run.answer = lambda asked: answering(french=f"mot {next(numbers)}")(asked)
    program: Any = dspy.Predict("english -> french")
    program.set_lm(lm(run, api_key="arbor", temperature=1.0, max_tokens=64))
    compiler = dspys.GRPO(
        metric=length, exclude_demos=True, num_train_steps=1, num_threads=2,
        num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=3,
    )  # fmt: skip
    compiler.compile(program, trainset=examples(4))
    counts = run.steps[1]["counts"]
    assert (counts["trained"], counts["retokenised"]) == (6, 0)
    assert {it.headers["authorization"] for it in run.asked} == {f"Bearer {TOKEN}"}
