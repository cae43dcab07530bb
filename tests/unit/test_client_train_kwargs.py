"""train_kwargs from a program to its steps: checked before any rollout, sent with each step of a compile."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.cli.main import split
from launcher.client import GRPO, PolicyLM, TrainingFailed, launch_line
from launcher.client import train_kwargs as client
from launcher.client.dspy import compile_start
from runtime.shared.train_kwargs import bodies
from tests.support import abuses as a
from tests.support import readme_commands
from tests.support.small_run import TOKEN, Asked, SmallRun, answering

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = a.varied
    return run


def examples(count: int = 2) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}").with_inputs("english") for i in range(count)]


def train(steps: int = 1, student: dspy.Module | None = None, **changes: Any) -> GRPO:
    settings = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 2, **changes}
    grpo = GRPO(a.length, num_train_steps=steps, **settings)
    grpo.compile(student or a.predict(), trainset=examples())
    return grpo


def sent(run: SmallRun) -> list[dict[str, Any] | None]:
    found = [request.settings for request in run.requests.values()]
    return [it and it.model_dump(exclude_none=True) for it in found]


def test_the_clients_bodies_are_the_runtimes() -> None:
    for name in ("TrainKwargsRequest", "Refusal", "TrainKwargsResponse"):
        ours, theirs = getattr(client, name), getattr(bodies, name)
        assert list(ours.model_fields) == list(theirs.model_fields)
        assert ours.model_config == theirs.model_config


def test_a05_what_is_said_in_python_goes_with_each_step_of_that_compile_and_no_other(run: SmallRun) -> None:
    said = {"learning_rate": 1e-5, "loss_type": "dapo", "lr_scheduler_type": "linear", "warmup_steps": 1}
    train(2, train_kwargs=said)
    train(1, seed=1)
    settings = {
        "learning_rate": 1e-5,
        "loss": "dapo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "schedule": "linear",
        "warmup_steps": 1,
        "schedule_steps": 2,
    }
    assert sent(run) == [settings | {"schedule_step": 0}, settings | {"schedule_step": 1}, None]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a05_a_step_has_its_own_place_in_the_schedule(run: SmallRun, staleness: int) -> None:
    train(4, train_kwargs={"lr_scheduler_type": "cosine"}, staleness=staleness)
    assert [it and it["schedule_step"] for it in sent(run)] == [0, 1, 2, 3]


def test_a05_where_nothing_is_said_nothing_is_asked_or_sent(run: SmallRun) -> None:
    train(1)
    assert (run.train_kwargs, sent(run)) == ([], [None])
    train(1, train_kwargs={"temperature": 1.0}, seed=1)
    assert sent(run) == [None, None]


def test_a04_a_run_that_cannot_follow_is_said_before_any_rollout_with_the_line_that_fits(
    run: SmallRun,
) -> None:
    kwargs = {"lora_config": {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1}, "learning_rate": 1e-5}
    with pytest.raises(TrainingFailed) as failed:
        train(1, train_kwargs=kwargs)
    assert "lora_config.r: 8 was requested, this run has 16" in str(failed.value)
    fits = "launch --set train.lora.rank=8 --set train.lora.alpha=32 -- python PROGRAM"
    assert fits in (failed.value.hint or "")
    assert not run.asked and not run.requests


# A line of `launch`, the LoRA of a program's train_kwargs, and the line that trains it.
LINES = [
    (
        "launch --arbor --gpus H100:2 -y --model Qwen/Qwen3-1.7B -- python 'my program.py' --steps 3",
        {"r": 8, "lora_alpha": 32},
        "launch --arbor --gpus H100:2 -y --model Qwen/Qwen3-1.7B --set train.lora.rank=8 "
        "--set train.lora.alpha=32 -- python 'my program.py' --steps 3",
    ),
    (
        "launch --set=train.lora.rank=4 --set train.seed=2 --arbor -- python my.py",
        {"r": 8},
        "launch --set train.seed=2 --arbor --set train.lora.rank=8 -- python my.py",
    ),
]


@pytest.mark.parametrize(("line", "lora", "fits"), LINES)
def test_s04_the_hint_at_a_rank_of_the_programs_own_is_its_whole_line_again(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, line: str, lora: dict[str, int], fits: str
) -> None:
    monkeypatch.setenv("LAUNCH_LINE", line)
    with pytest.raises(TrainingFailed) as failed:
        train(1, train_kwargs={"lora_config": lora})
    assert failed.value.hint == fits
    own, program = split(shlex.split(fits)[1:])
    invocation = readme_commands.parsed(own, program)
    assert f"train.lora.rank={lora['r']}" in invocation.sets and invocation.flags["arbor"]
    assert program and program[0] == "python"
    assert launch_line.line_with("--arbor --model a/b").count("--arbor") == 1


def test_a03_the_hint_at_another_model_has_no_adapter_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_LINE", "launch --arbor --from=dev --budget 4 -- python my.py")
    assert launch_line.line_with("--model a/b") == "launch --arbor --budget 4 --model a/b -- python my.py"
    kept = launch_line.line_with("--set max_staleness=2")
    assert kept == "launch --arbor --from=dev --budget 4 --set max_staleness=2 -- python my.py"


def test_s04_no_line_is_given_that_would_train_another_model_than_the_run_it_starts_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAUNCH_LINE", "launch --arbor --from dev@7 --gpus H100 -- python my.py")
    assert launch_line.line_with("--set train.lora.rank=8") is None
    assert launch_line.line_with("--set train.seed=8") is not None


def test_a04_what_has_no_effect_is_said_once(run: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    train(3, train_kwargs={"max_steps": 1000, "learning_rate": 1e-6})
    said = capfd.readouterr().err
    assert said.count("grpo: train_kwargs: max_steps=1000: it counts Arbor's groups") == 1
    assert said.count("grpo: train_kwargs: learning_rate=1e-06: used as it is") == 1


def test_a04_the_temperature_of_rollouts_is_theirs(run: SmallRun) -> None:
    train(1, train_kwargs={"temperature": 0.7, "learning_rate": 1e-5})
    assert {it.body["temperature"] for it in run.asked if it.tag("rollout")} == {0.7}


def test_c60_they_are_in_the_compiles_line_and_in_the_state_of_each_step(
    run: SmallRun, tmp_path: Path
) -> None:
    train(1, train_kwargs={"learning_rate": 1e-5, "warmup_steps": 3})
    lines = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    settings = {"learning_rate": 1e-5, "warmup_steps": 3}
    assert next(it for it in lines if it["kind"] == "compile")["settings"] == settings
    assert run.client_state is not None and run.client_state["settings"] == settings


def begin_life(monkeypatch: pytest.MonkeyPatch, resumed_after: int) -> None:
    monkeypatch.setattr(compile_start, "_compiles", type(compile_start._compiles)(list))
    monkeypatch.setenv("LAUNCH_PROGRAM", f"slip-1@{resumed_after}")


@pytest.mark.process
def test_c60_a_resumed_compile_goes_on_in_its_schedule_and_other_kwargs_are_said(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"learning_rate": 1e-5, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    begin_life(monkeypatch, 0)
    train(2, train_kwargs=kwargs)
    begin_life(monkeypatch, 2)
    train(3, train_kwargs=kwargs)
    assert "are not those of" not in capfd.readouterr().err
    begin_life(monkeypatch, 3)
    train(5, train_kwargs=kwargs | {"learning_rate": 3e-5})
    said = capfd.readouterr().err
    assert "train_kwargs are not those of the first 3 steps: learning_rate 1e-05 -> 3e-05" in said
    assert [(it or {})["schedule_step"] for it in sent(run)] == [0, 1, 2, 3, 4]
    assert [(it or {})["learning_rate"] for it in sent(run)] == [1e-5] * 3 + [3e-5] * 2


def test_c60_a_step_that_is_rolled_out_again_after_a_loss_has_the_same_settings(run: SmallRun) -> None:
    def answer(asked: Asked) -> str:
        if len(run.requests) == 2 and run.machine == 1:
            run.lose_machine(1)
        return a.varied(asked)

    run.answer = answer
    train(3, train_kwargs={"lr_scheduler_type": "linear", "learning_rate": 1e-5})
    assert [(it or {})["schedule_step"] for it in sent(run)] == [0, 1, 2]


# ------------------------------------------------------------------ by LM, and older names


def test_a06_kwargs_and_adapter_by_lm_are_taken_where_all_are_the_policy(run: SmallRun) -> None:
    plain = dspy.LM("openai/policy", api_base=run.base_url, api_key=TOKEN)
    student = a.Two()
    student.first.lm, student.second.lm = PolicyLM(), plain
    kwargs = {"learning_rate": 1e-5}
    run.answer = answering(french="mot", english="hi")
    by_lm = {student.first.lm: kwargs, plain: dict(kwargs)}
    adapter = dspy.XMLAdapter()
    run.answer = lambda asked: "<french>mot</french><english>hi</english>"
    train(1, student, train_kwargs=by_lm, adapter={plain: adapter})
    assert sent(run) == [{"learning_rate": 1e-5}]


def test_a06_kwargs_of_another_model_or_two_of_one_policy_are_refused(run: SmallRun) -> None:
    other = dspy.LM("openai/gpt-x", api_base="http://127.0.0.1:1/v1", api_key="x")
    with pytest.raises(ValueError, match="given for 'openai/gpt-x', which is not this run's policy"):
        train(1, train_kwargs={other: {"learning_rate": 1e-5}})
    with pytest.raises(ValueError, match="train_kwargs differs by LM, but they are one policy"):
        train(1, train_kwargs={PolicyLM(): {"learning_rate": 1e-5}, PolicyLM(): {"learning_rate": 2e-5}})
    with pytest.raises(ValueError, match="adapter is given for 'openai/gpt-x'"):
        train(1, adapter={other: dspy.ChatAdapter()})
    assert not run.asked


def test_a06_papillons_spellings_are_taken_with_a_line(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    grpo = GRPO(
        a.length,
        multitask=True,
        num_dspy_examples_per_grpo_step=2,
        num_samples_per_input=3,
        num_train_steps=1,
    )
    grpo.compile(a.predict(), trainset=examples())
    assert grpo.report.rollouts == 6
    said = capfd.readouterr().err
    assert said.count("num_samples_per_input=3 is an older name: say num_rollouts_per_grpo_step=3") == 1
    with pytest.raises(ValueError, match="two names of one thing"):
        GRPO(a.length, num_samples_per_input=3, num_rollouts_per_grpo_step=4)


# ------------------------------------------------------------------ --openai-env


@pytest.fixture
def openai_env(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", run.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)


def was_requested(run: SmallRun, good: Any) -> Any:
    """As the gateway: a model that it has not is a 404."""

    def answer(asked: Asked) -> Any:
        if asked.body["model"].rpartition("/")[2].startswith("gpt-"):
            words = f"The model `{asked.body['model']}` does not exist."
            return 404, {
                "error": {"message": words, "type": "t", "param": "model", "code": "model_not_found"}
            }
        return good(asked)

    return answer


class Delegating(dspy.Module):
    """As PAPILLON is built: one predictor before and one behind a model that is not to be trusted."""

    def __init__(self, untrusted: dspy.LM) -> None:
        super().__init__()
        self.craft = dspy.ChainOfThought("english -> french")
        self.respond = dspy.Predict("english, french -> answer")
        self.untrusted = untrusted

    def forward(self, english: str) -> dspy.Prediction:
        try:
            asked = self.craft(english=english).french
            self.untrusted(asked)
            return dspy.Prediction(french=self.respond(english=english, french=asked).answer)
        except Exception:  # noqa: BLE001 - as its tutorial has it
            return dspy.Prediction(french="")


@pytest.mark.process
@pytest.mark.usefixtures("openai_env")
def test_a08_with_openai_env_a_model_the_run_has_not_is_not_trained_and_it_is_said_at_once(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = was_requested(run, answering(reasoning="r", french="mot", answer="mot"))
    untrusted = dspy.LM("openai/gpt-4.1-mini", cache=False, num_retries=0)
    student = Delegating(untrusted)
    student.craft.set_lm(PolicyLM())
    student.respond.lm = PolicyLM()
    with pytest.raises(TrainingFailed) as failed:
        train(1, student)
    assert "openai/gpt-4.1-mini" in str(failed.value)
    said = capfd.readouterr().err
    assert (
        "grpo: 'openai/gpt-4.1-mini' is not trained, and would fail: OPENAI_BASE_URL names this run" in said
    )
    assert 'api_base="https://api.openai.com/v1" and its own api_key' in said
    assert not run.requests


@pytest.mark.usefixtures("openai_env")
def test_a08_with_openai_env_both_predictors_are_trained_where_the_other_model_has_its_own_address(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = SmallRun(answer=lambda asked: "a long answer")
    run.answer = lambda asked: answering(reasoning="r", french="mot", answer="mot" + "x" * a.member(asked))(
        asked
    )
    student = Delegating(
        dspy.LM("openai/gpt-4.1-mini", api_base=elsewhere.base_url, api_key=TOKEN, cache=False)
    )
    student.set_lm(PolicyLM())
    try:
        train(1, student)
    finally:
        elsewhere.close()
    assert "would fail" not in capfd.readouterr().err
    assert {group.predictor for group in run.requests[1].groups} == {"craft.predict", "respond"}
    assert elsewhere.asked
    assert {it.body["model"] for it in run.asked} == {"policy"}


@pytest.mark.usefixtures("openai_env")
def test_a08_with_openai_env_a_module_of_the_program_that_asks_openai_is_never_given_the_policy(
    run: SmallRun,
) -> None:
    run.answer = was_requested(run, answering(reasoning="r", french="mot", english="hi"))
    student = a.Two()
    judge = dspy.LM("openai/gpt-4.1-mini", cache=False, num_retries=0)
    student.first.lm, student.second.lm = PolicyLM(), judge
    with pytest.raises(TrainingFailed):
        train(1, student)
    assert student.second.lm is judge
    models = {it.body["model"] for it in run.asked if it.tag("predictor") == "second"}
    assert not models


@pytest.mark.usefixtures("openai_env")
def test_a08_with_openai_env_a_judge_of_openais_is_counted_as_anothers_failure(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.answer = was_requested(run, a.varied)
    judge = dspy.Predict("french -> verdict")
    judge.lm = dspy.LM("openai/gpt-4.1-mini", cache=False, num_retries=0)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        return float(judge(french=prediction.french).verdict == "yes")

    grpo = GRPO(metric, num_train_steps=1, num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=2)
    with pytest.raises(TrainingFailed):
        grpo.compile(a.predict(), trainset=examples())
    assert grpo.report.outcomes == {"outside": 4}
    said = capfd.readouterr().err
    assert "openai/gpt-4.1-mini failed: OPENAI_BASE_URL names this run, which has no such model" in said


@pytest.mark.usefixtures("openai_env")
@pytest.mark.parametrize("name", ["policy", "arbor:policy", "arbor:Qwen/Qwen2.5-1.5B-Instruct"])
def test_a07_with_openai_env_an_lm_of_the_runs_own_model_is_trained(run: SmallRun, name: str) -> None:
    student = a.predict()
    student.set_lm(dspy.LM(f"openai/{name}", max_tokens=13))
    train(1, student)
    assert len(run.requests) == 1


@pytest.mark.usefixtures("openai_env")
def test_a07_arbors_name_of_another_model_is_an_error_that_names_the_runs(run: SmallRun) -> None:
    student = a.predict()
    student.set_lm(dspy.LM("openai/arbor:Qwen/Qwen3-8B"))
    with pytest.raises(
        ValueError, match=r"asks for 'openai/arbor:Qwen/Qwen3-8B': this run trains Qwen/Qwen2.5"
    ):
        train(1, student)


def test_a08_without_it_an_lm_of_openais_is_another_model_as_ever(run: SmallRun) -> None:
    assert "OPENAI_BASE_URL" not in os.environ
    student = a.predict()
    student.set_lm(dspy.LM("openai/gpt-4.1-mini"))
    with pytest.raises(ValueError, match="no predictor of the program uses this run's policy"):
        train(1, student)


def test_a08_an_address_of_its_own_means_the_run_whatever_the_name(run: SmallRun) -> None:
    student = a.predict()
    student.set_lm(dspy.LM("openai/anything", api_base=run.base_url, api_key=TOKEN))
    train(1, student)
    assert len(run.requests) == 1


def test_a_plain_lm_of_the_base_is_not_trained(run: SmallRun) -> None:
    student = a.predict()
    student.set_lm(dspy.LM("openai/base", api_base=run.base_url, api_key=TOKEN))
    with pytest.raises(ValueError, match="no predictor of the program uses this run's policy"):
        train(1, student)
