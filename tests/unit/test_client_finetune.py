"""DSPy's BootstrapFinetune on the policy, as it comes: its examples become supervised steps (A14)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus

from launcher.client import PolicyLM, StepFailed, TrainingFailed, load
from launcher.client.dspy.provider import SlipwayProvider
from launcher.client.dspy.sft_plan import SFTPlan
from launcher.client.request_bodies import MOST_EXAMPLES
from tests.support import abuses as a
from tests.support.environment import REPOSITORY
from tests.support.lives import be_another_process, begin_life
from tests.support.small_run import TOKEN, SmallRun

pytestmark = pytest.mark.usefixtures("warm")


def examples(count: int = 8) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(count)]


def student(run: SmallRun, **settings: Any) -> Any:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run.session(), **settings))
    return program


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "mot"}]}
        for i in range(count)
    ]


def finetuned(lm: PolicyLM, count: int = 8, **train_kwargs: Any) -> Any:
    return lm.finetune(conversations(count), TrainDataFormat.CHAT, train_kwargs)


def asked_in(run: SmallRun, step: int) -> list[str]:
    """The users' messages that a step's examples have."""
    return [it.messages[0]["content"] for it in run.requests[step].examples]


def test_a14_bootstrap_finetune_trains_and_its_program_asks_the_version_that_came_out(run: SmallRun) -> None:
    optimizer = dspy.BootstrapFinetune(
        metric=a.length, train_kwargs={"num_train_epochs": 2, "gradient_accumulation_steps": 4}
    )
    given = student(run, max_tokens=17)
    program: Any = optimizer.compile(given, trainset=examples(8))
    assert [len(it.examples) for it in run.requests.values()] == [4, 4, 4, 4]
    assert not any(it.groups for it in run.requests.values())
    assert isinstance(program.lm, PolicyLM) and program.lm.model == run.name_of(4)
    assert program.lm.kwargs["max_tokens"] == 17
    assert run.named == ["step-000004"], "it is kept"
    program(english="hi")
    assert run.asked[-1].body["model"] == run.name_of(4)
    first = run.requests[1].examples[0].messages
    assert [it["role"] for it in first] == ["system", "user", "assistant"]
    assert "[[ ## french ## ]]\nbonjour" in first[-1]["content"]


def test_a14_the_users_own_lm_goes_on_meaning_the_newest(run: SmallRun) -> None:
    lm = PolicyLM(run.session())
    trained = finetuned(lm, num_train_epochs=1).result()
    assert (lm.model, trained.model) == ("policy", run.name_of(1))
    assert finetuned(lm, num_train_epochs=1).result().model == run.name_of(2)
    assert trained.model == run.name_of(1)


def test_a14_defaults_are_those_of_dspys_local_trainer(run: SmallRun) -> None:
    finetuned(PolicyLM(run.session()), count=12).result()
    assert [len(it.examples) for it in run.requests.values()] == [8, 4] * 5


def test_a14_each_epoch_has_every_example_once_in_an_order_of_its_own() -> None:
    plan = SFTPlan.of(10, {"num_train_epochs": 3, "gradient_accumulation_steps": 4, "seed": 7})
    steps = [plan.at(step) for step in range(plan.steps)]
    epochs = [[it for step in steps[at : at + 3] for it in step] for at in range(0, 9, 3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = SFTPlan.of(10, {"num_train_epochs": 3, "gradient_accumulation_steps": 4, "seed": 8})
    assert again.at(0) != plan.at(0)


@pytest.mark.parametrize(
    ("train_kwargs", "steps", "per_step"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 1}, 2, 6),
        ({"max_steps": 7}, 7, 8),
        ({"num_train_epochs": 0.5, "gradient_accumulation_steps": 1}, 5, 1),
        ({"num_train_epochs": 3.0, "gradient_accumulation_steps": None}, 6, 8),
    ],
)
def test_a14_how_much_is_trained(train_kwargs: dict[str, Any], steps: int, per_step: int) -> None:
    plan = SFTPlan.of(10, train_kwargs)
    assert (plan.steps, plan.per_step) == (steps, per_step)


@pytest.mark.parametrize(
    "train_kwargs",
    [
        {"num_train_epochs": 0},
        {"num_train_epochs": "3"},
        {"num_train_epochs": float("nan")},
        {"per_device_train_batch_size": 0},
        {"gradient_accumulation_steps": 2.5},
        {"per_device_train_batch_size": MOST_EXAMPLES, "gradient_accumulation_steps": 2},
        {"seed": True},
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_before_anything_is_trained(
    run: SmallRun, train_kwargs: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"train_kwargs: {next(iter(train_kwargs))}"):
        finetuned(PolicyLM(run.session()), **train_kwargs).result()
    assert not run.requests


def test_a14_what_a_trainers_keywords_mean_is_the_runs_to_say(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.meaning = {
        "settings": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "schedule_steps": 2,
            "warmup_steps": 1,
            "weight_decay": 0.1,
        },
        "notes": ["bf16 has no effect here"],
    }
    asked = {"learning_rate": 1e-4, "lr_scheduler_type": "linear", "bf16": True}
    finetuned(PolicyLM(run.session()), num_train_epochs=2, seed=3, **asked).result()
    assert run.train_kwargs == [asked], "how much is trained is not the run's to say"
    said = [it.settings for it in run.requests.values()]
    assert [(it.learning_rate, it.schedule, it.weight_decay) for it in said if it] == [
        (1e-4, "linear", 0.1)
    ] * 2
    assert [(it.schedule_step, it.schedule_steps) for it in said if it] == [(0, 2), (1, 2)]
    assert capfd.readouterr().err.count("train_kwargs: bf16 has no effect here") == 1


def test_a14_without_a_schedule_of_its_own_a_job_has_no_place_in_one(run: SmallRun) -> None:
    run.meaning = {"settings": {"learning_rate": 1e-4, "schedule": None}}
    finetuned(PolicyLM(run.session()), num_train_epochs=2, learning_rate=1e-4).result()
    said = [it.settings.model_dump(exclude_none=True) for it in run.requests.values() if it.settings]
    assert said == [{"learning_rate": 1e-4}] * 2
    run.meaning = {"settings": {"learning_rate": None}}
    finetuned(PolicyLM(run.session()), num_train_epochs=1, bf16=True).result()
    assert run.requests[3].settings is None


def test_a14_what_needs_another_run_is_refused_with_the_launch_line(run: SmallRun) -> None:
    run.meaning = {
        "refusals": [{"key": "lora_config", "why": "rank 64 is not 16", "launch": "--set train.lora.rank=64"}]
    }
    job = finetuned(PolicyLM(run.session()), lora_config={"r": 64})
    with pytest.raises(TrainingFailed, match="rank 64 is not 16") as refused:
        job.result()
    assert refused.value.hint and "`launch --set train.lora.rank=64 -- python PROGRAM`" in refused.value.hint
    assert not run.requests and job.status() == TrainingStatus.failed


def test_nothing_to_imitate_is_an_error_that_says_so(run: SmallRun) -> None:
    def never(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> bool:
        return False

    with pytest.raises(TrainingFailed, match="There is no example to learn from"):
        dspy.BootstrapFinetune(metric=never).compile(student(run), trainset=examples(2))
    assert not run.requests


@pytest.mark.parametrize("data_format", [TrainDataFormat.COMPLETION, TrainDataFormat.GRPO_CHAT, "columns"])
def test_another_form_of_data_is_refused_by_name(run: SmallRun, data_format: Any) -> None:
    job = PolicyLM(run.session()).finetune(conversations(1), data_format)
    with pytest.raises(ValueError, match=r"learns from conversations \(TrainDataFormat.CHAT\)"):
        job.result()


def test_a_step_that_fails_fails_the_job(run: SmallRun) -> None:
    run.fail_step = "the loss is not finite"
    job = finetuned(PolicyLM(run.session()))
    with pytest.raises(StepFailed, match="the loss is not finite"):
        job.result()
    assert job.status() == TrainingStatus.failed


def test_a14_a_cancelled_job_takes_no_further_step(run: SmallRun) -> None:
    held, go_on = threading.Event(), threading.Event()
    real = run.step

    def stop_at_the_second(request: Any) -> Any:
        if len(run.requests) == 1:
            held.set()
            go_on.wait(20)
        return real(request)

    run.step = stop_at_the_second  # type: ignore[method-assign]
    job = finetuned(PolicyLM(run.session()))
    assert held.wait(20)
    assert job.cancel() and job.status() == TrainingStatus.cancelled
    go_on.set()
    job.thread.join(20)
    assert len(run.requests) == 2
    with pytest.raises(CancelledError):
        job.result()
    assert finetuned(PolicyLM(run.session()), num_train_epochs=1).result().model == run.name_of(3)


@pytest.mark.process
def test_a_program_that_has_ended_is_not_kept_from_it_by_its_job(run: SmallRun) -> None:
    program = (
        "import launcher.client as c, dspy\n"
        "data = [{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}]\n"
        "c.PolicyLM().finetune(data, 'chat', {'max_steps': 1000000})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert "finetune: cancelled after" in done.stderr
    assert len(run.requests) < 1000


def test_jobs_of_one_policy_take_turns_in_the_order_they_were_made(run: SmallRun) -> None:
    """As with multitask=False: each goes on from the one before. So many that chance makes no such order."""
    lm = PolicyLM(run.session())
    jobs = [finetuned(lm, count=count, num_train_epochs=1) for count in (16, 8, 24, 8, 16, 8, 24, 16)]
    ends = (2, 3, 6, 7, 9, 10, 13, 15)
    assert [job.result().model for job in jobs] == [run.name_of(version) for version in ends]


def test_that_an_older_version_is_not_what_is_trained_is_said(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    first = finetuned(PolicyLM(run.session()), num_train_epochs=1).result()
    assert "the policy is one" not in capfd.readouterr().err
    finetuned(first, num_train_epochs=1).result()
    assert "the policy is one" not in capfd.readouterr().err, "it is the newest"
    finetuned(first, num_train_epochs=1).result()
    said = f"the policy is one: this goes on from v2, not from {run.name_of(1)}"
    assert said in capfd.readouterr().err


def test_launch_and_kill_end_nothing(run: SmallRun) -> None:
    lm = PolicyLM(run.session())
    run.posted.clear()
    lm.launch()
    lm.kill()
    lm.launch({"anything": 1})
    assert not run.posted


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, PolicyLM.copy])
def test_copies_of_an_lm_are_trained_by_the_same_run(run: SmallRun, way: Any) -> None:
    lm = PolicyLM(run.session())
    assert way(lm).provider is lm.provider


def test_a_plain_lm_of_the_run_is_trained_through_the_same_provider(run: SmallRun) -> None:
    lm = dspy.LM(
        "openai/policy", api_base=run.base_url, api_key=TOKEN, provider=SlipwayProvider(), cache=False
    )
    program = dspy.Predict("english -> french")
    program.set_lm(lm)
    optimizer = dspy.BootstrapFinetune(metric=a.length, train_kwargs={"num_train_epochs": 1})
    trained: Any = optimizer.compile(program, trainset=examples(2))
    assert trained.lm.model == f"openai/{run.name_of(1)}"
    trained(english="hi")
    assert run.asked[-1].body["model"] == run.name_of(1)


# ------------------------------------------------------------------ restarted (A18)


def killed_at(run: SmallRun, step: int) -> None:
    """From this step on the run answers no more, as to a program that is no more."""
    real = run.step
    run.step = lambda request: real(request) if len(run.requests) < step else _gone()  # type: ignore


def _gone() -> tuple[int, dict[str, Any]]:
    return 500, {"error": {"message": "killed", "type": "an_error", "param": None, "code": None}}


def go_on(run: SmallRun) -> None:
    del run.step


def test_a18_a_restarted_job_goes_on_after_the_last_committed_step_with_its_own_examples(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    killed_at(run, 2)
    with pytest.raises(Exception, match="killed"):
        finetuned(PolicyLM(run.session()), count=16, num_train_epochs=2).result()
    go_on(run)
    begin_life(monkeypatch, 2)
    # The policy is another one by now, so DSPy comes with other examples: fewer, too.
    trained = finetuned(PolicyLM(run.session()), count=3, num_train_epochs=2).result()
    assert trained.model == run.name_of(4)
    assert sorted(asked_in(run, 1) + asked_in(run, 2), key=int) == [str(it) for it in range(16)]
    assert sorted(asked_in(run, 3) + asked_in(run, 4), key=int) == [str(it) for it in range(16)]
    assert len({it.key for it in run.requests.values()}) == 4


def test_a18_a_job_that_had_finished_trains_nothing_again(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_life(monkeypatch)
    lm = PolicyLM(run.session())
    first = finetuned(lm, num_train_epochs=1).result()
    killed_at(run, 2)
    with pytest.raises(Exception, match="killed"):
        finetuned(lm, count=24, num_train_epochs=1).result()
    go_on(run)
    begin_life(monkeypatch, 2)
    again = finetuned(PolicyLM(run.session()), num_train_epochs=1).result()
    assert "this job finished before the program was restarted" in capfd.readouterr().err
    assert (len(run.requests), again.model) == (2, first.model)
    assert finetuned(PolicyLM(run.session()), count=24, num_train_epochs=1).result().model == run.name_of(4)
    assert [len(it.examples) for it in run.requests.values()] == [8, 8, 8, 8]


def test_a18_another_program_of_the_same_launch_trains_all_of_its_own(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    finetuned(PolicyLM(run.session()), num_train_epochs=1).result()
    be_another_process(monkeypatch)
    finetuned(PolicyLM(run.session()), num_train_epochs=1).result()
    assert len({it.key for it in run.requests.values()}) == 2


def test_a18_a_machine_that_is_lost_in_between_is_trained_again_from_its_step(run: SmallRun) -> None:
    real = run.step

    def lose_once(request: Any) -> Any:
        if len(run.requests) == 2 and run.machine == 1:
            run.lose_machine(to_step=1)
            return run.rewound("the machine")
        return real(request)

    run.step = lose_once  # type: ignore[method-assign]
    trained = finetuned(PolicyLM(run.session()), count=16, num_train_epochs=2).result()
    assert trained.model == run.name_of(4)
    assert sorted(asked_in(run, 1) + asked_in(run, 2), key=int) == [str(it) for it in range(16)]


# ------------------------------------------------------------------ saved (A17)


def test_a17_a_finetuned_program_is_loaded_in_a_later_run_and_outside_any(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-the-users-own-key")
    optimizer = dspy.BootstrapFinetune(metric=a.length, train_kwargs={"num_train_epochs": 1})
    path = tmp_path / "program.json"
    optimizer.compile(student(run, max_tokens=9), trainset=examples(2)).save(path)
    assert TOKEN not in path.read_text() and "api.openai.com" not in path.read_text()
    assert json.loads(path.read_text())["lm"]["launch_kwargs"] == {"slipway_model": run.name_of(1)}

    later = SmallRun(run_id="run-2")
    try:
        monkeypatch.setenv("LAUNCH_BASE_URL", later.base_url)
        program: Any = load(dspy.Predict("english -> french"), path)
        program(english="hi")
        assert (later.asked[0].body["model"], later.asked[0].body["max_tokens"]) == ("policy", 9)
        monkeypatch.delenv("LAUNCH_BASE_URL")
        elsewhere = dspy.LM("openai/served", api_base=later.base_url, api_key=TOKEN, cache=False)
        program = load(dspy.Predict("english -> french"), path, lm=elsewhere)
        program(english="hi")
        assert later.asked[-1].body["model"] == "served"
    finally:
        later.close()
