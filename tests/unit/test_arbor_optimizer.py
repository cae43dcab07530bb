"""Arbor's optimizer and spellings against a small endpoint (A1, A6, A9). Its LM: `test_arbor_provider.py`."""

from __future__ import annotations

import inspect
import json
import re
import threading
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, Refused, arbor
from launcher.client.arbor import adapter_copy, jobs, server
from launcher.client.arbor.arbor_provider import ArborProvider
from launcher.client.arbor.optimizer import ArborGRPO
from tests.support.arbor_names import unused
from tests.support.arbor_programs import NEUTRAL, examples, length, lm
from tests.support.small_run import TOKEN, Asked, SmallRun, answering
from tests.support.waiting import wait_until
from tests.unit.test_train_kwargs import FITS, PAPILLON, QUICKSTART

__all__ = ["unused"]

pytestmark = pytest.mark.usefixtures("unused")


def student(run: SmallRun, **settings: Any) -> dspy.Predict:
    program = dspy.Predict("english -> french")
    program.set_lm(lm(run, api_key="arbor", **NEUTRAL, max_tokens=64, **settings))
    return program


def optimizer(**changes: Any) -> ArborGRPO:
    settings: dict[str, Any] = {"metric": length, "exclude_demos": True, "num_train_steps": 1}
    return ArborGRPO(**{**settings, **changes})


def said(capsys: pytest.CaptureFixture[str], word: str) -> int:
    """How many of the lines that Arbor's names have said have this word."""
    lines = capsys.readouterr().err.splitlines()
    return sum(line.startswith("arbor: ") and word in line for line in lines)


def varied(run: SmallRun) -> None:
    """Answers that differ inside a group, and are longer with each version."""
    run.answer = lambda asked: answering(
        french="o" * (1 + run.version + len(asked.tag("rollout") or "") % 7)
    )(asked)


# ------------------------------------------------------------------ A1


def test_a01_the_quickstarts_calls_in_its_order_train_the_policy(run: SmallRun) -> None:
    info = arbor.init()
    program = dspy.Predict("english -> french")
    provider = ArborProvider()
    student_lm = dspy.LM(
        model=f"openai/arbor:{run.hub_name}", provider=provider, api_base=info["base_url"], api_key="arbor",
        temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, max_tokens=2048,
    )  # fmt: skip
    student_program = program.deepcopy()
    student_program.set_lm(student_lm)
    compiler = ArborGRPO(
        metric=length, num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=3, exclude_demos=True,
        num_train_steps=2, num_threads=16, use_train_as_val=False, num_steps_for_val=1,
        train_kwargs=NEUTRAL, checkpoint="single-best",
    )  # fmt: skip
    optimized = compiler.compile(student=student_program, trainset=examples(4), valset=examples(2))
    assert optimized(english="hello").french == "bonjour"
    groups = [group for request in run.requests.values() for group in request.groups]
    assert len(groups) == 4 and {len(it.members) for it in groups} == {3}
    assert optimized.lm.model.startswith("policy@v") and isinstance(optimized.lm, PolicyLM)
    assert {it.headers["authorization"] for it in run.asked} == {f"Bearer {TOKEN}"}


def test_x13_the_defaults_and_the_order_of_the_parameters_are_arbors() -> None:
    parameters = inspect.signature(ArborGRPO).parameters
    assert list(parameters)[:17] == [
        "metric", "train_kwargs", "adapter", "exclude_demos", "num_threads", "num_train_steps", "seed",
        "num_dspy_examples_per_grpo_step", "num_rollouts_per_grpo_step", "use_train_as_val",
        "num_steps_for_val", "report_train_scores", "failure_score", "format_failure_score",
        "variably_invoked_predictor_grouping_mode", "variably_invoked_predictor_fill_strategy", "checkpoint",
    ]  # fmt: skip
    asked = ArborGRPO(length, exclude_demos=True)
    assert (asked.num_dspy_examples_per_grpo_step, asked.num_rollouts_per_grpo_step) == (1, 4)
    assert (asked.num_train_steps, asked.num_threads, asked.num_steps_for_val) == (500, 6, 5)
    assert asked.variably_invoked_predictor_grouping_mode == "truncate"
    assert isinstance(asked, GRPO)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"exclude_demos": False}, "exclude_demos=True"),
        ({"use_train_as_val": True}, "report_train_scores=True"),
        ({"metric": None}, "needs a metric"),
        ({"checkpoint": ""}, "a folder's name"),
        ({"checkpoint": __file__}, "is a file"),
        ({"num_samples_per_input": 3, "num_rollouts_per_grpo_step": 5}, "two names of one thing"),
        ({"num_rollouts_per_grpo_step": 1}, "at least 2"),
        ({"variably_invoked_predictor_fill_strategy": "all"}, "'randint', 'max' or None"),
        ({"variably_invoked_predictor_grouping_mode": "some"}, "must be"),
        ({"multitask": False}, "multitask=False"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer(**given)


def test_an_lm_of_another_model_is_refused_before_anything_is_trained(run: SmallRun) -> None:
    program = dspy.Predict("english -> french")
    program.set_lm(lm(run, "meta-llama/Llama-3.2-3B-Instruct", api_key="arbor"))
    with pytest.raises(Refused, match="does not train meta-llama"):
        optimizer().compile(program, trainset=examples(1))
    assert not run.asked and not run.steps


# ------------------------------------------------------------------ A6


def test_a06_multitask_and_num_samples_per_input_are_taken_each_with_one_line(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        compiler = optimizer(multitask=True, num_samples_per_input=3)
    assert compiler.num_rollouts_per_grpo_step == 3
    heard = [it for it in capsys.readouterr().err.splitlines() if it.startswith("arbor: ")]
    assert len(heard) == 2 and "num_samples_per_input=3" in heard[0] + heard[1]
    compiler.compile(student(run), trainset=examples(1))
    assert [len(it.members) for it in run.requests[1].groups] == [3]


@pytest.mark.parametrize("strategy", [None, "randint", "max"])
def test_a06_fill_is_ragged_with_one_line(strategy: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    mode = "fill"
    for _ in range(2):
        compiler = optimizer(
            variably_invoked_predictor_grouping_mode=mode, variably_invoked_predictor_fill_strategy=strategy
        )
    assert compiler.variably_invoked_predictor_grouping_mode == "ragged"
    assert compiler.variably_invoked_predictor_fill_strategy is None
    assert said(capsys, "'fill' is taken as 'ragged'") == 1


def test_a06_a_path_as_checkpoint_gets_the_best_adapter_as_peft(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied(run)
    folder = tmp_path / "checkpoints" / "rl_qa"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("of an earlier run")
    for version in (1, 2):  # what comes home by itself while the run lives
        adapter = tmp_path / "durable" / f"step-{version:06d}" / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "of": version}))
        (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    compiler = optimizer(checkpoint=str(folder), num_train_steps=2, num_steps_for_val=1)
    assert compiler.checkpoint == "single-best"
    compiler.compile(student(run), trainset=examples(2), valset=examples(2))
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 8, "of": 2}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert sorted(it.name for it in folder.parent.iterdir()) == ["rl_qa"]
    assert said(capsys, str(folder)) == 2, "once what the path means, once that the adapter is there"


def test_a06_where_no_adapter_comes_home_it_is_said_and_nothing_is_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert not adapter_copy.copy_best_adapter(folder, None, tmp_path)
    assert not adapter_copy.copy_best_adapter(folder, "step-000001", None)
    assert not adapter_copy.copy_best_adapter(folder, "step-000001", tmp_path, seconds=0)
    assert said(capsys, str(folder)) == 3 and not folder.exists()


def test_a06_adapter_and_train_kwargs_may_be_given_by_lm(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    program, other = student(run), dspy.LM("openai/gpt-4.1-mini")
    mine, adapter = program.lm, dspy.JSONAdapter()
    run.answer = lambda asked: json.dumps({"french": "bonjour"})
    compiler = optimizer(
        train_kwargs={mine: {"temperature": 1.0}, other: {"temperature": 0.5}}, adapter={mine: adapter}
    )
    compiler.compile(program, trainset=examples(1))
    assert compiler.train_kwargs == {"temperature": 1.0} and compiler.adapter is adapter
    assert compiler.report.outcomes["scored"] == 4
    assert said(capsys, "by LM") == 1


def test_a06_what_differs_by_lm_or_is_for_no_lm_of_the_program_is_refused(run: SmallRun) -> None:
    program, other = student(run), dspy.LM("openai/gpt-4.1-mini")
    with pytest.raises(ValueError, match="none of these LMs"):
        optimizer(adapter={other: dspy.ChatAdapter()}).compile(program, trainset=examples(1))
    with pytest.raises(ValueError, match="the program's LM has"):
        optimizer(train_kwargs={program.lm: {"temperature": 0.5}}).compile(program, trainset=examples(1))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        optimizer(train_kwargs={program.lm: {"temperature": 0}}).compile(program, trainset=examples(1))


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("single-best", ["model_checkpoint_best"]),
        ("improvements", ["model_checkpoint_step_1", "model_checkpoint_step_2"]),
        ("none", []),
    ],
)
def test_the_validations_are_there_by_arbors_names(keep: str, names: list[str], run: SmallRun) -> None:
    varied(run)
    compiler = optimizer(num_train_steps=2, num_steps_for_val=1, checkpoint=keep)
    assert compiler.validation_scores == {} and compiler.best_validation_score is None
    compiler.compile(student(run), trainset=examples(2), valset=examples(2))
    scores = compiler.validation_scores
    assert list(scores) == [-1, 0, 1] and scores[1] == pytest.approx(scores[-1] + 2.0)
    assert (compiler.best_validation_score, compiler.best_validation_step) == (scores[1], 1)
    job = compiler.job
    assert job is not None and job.status == "succeeded" and list(job.checkpoints) == names
    assert job.last_checkpoint == (names[-1] if names else None)
    for entry in job.checkpoints.values():
        assert entry["metadata"]["step_index"] == entry["global_step"] - 1


# ------------------------------------------------------------------ a job that is shut down


def test_a03_a_job_that_is_shut_down_takes_no_more_steps_and_its_best_is_served(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    varied(run)
    compiler = optimizer(num_train_steps=50, num_steps_for_val=50)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        if compiler.job is not None and len(run.steps) == 1:
            arbor.shutdown_job(compiler.job.id)
        return length(example, prediction)

    compiler.metric = metric
    compiler.compile(student(run), trainset=examples(2), valset=examples(2))
    assert len(run.steps) == 2, "the step under way is trained"
    assert compiler.job is not None and compiler.job.status == "cancelled"
    assert list(compiler.validation_scores) == [-1, 1]
    assert "shut down after 2 of 50 steps" in capsys.readouterr().err


@pytest.mark.process
def test_a03_a_job_that_is_shut_down_notes_the_validation_under_way(run: SmallRun) -> None:
    varied(run)
    plain, moment = run.answer, threading.Event()
    compiler = optimizer(num_train_steps=50, num_steps_for_val=2, staleness=2)

    def answer(asked: Asked) -> Any:
        if asked.tag("purpose") == "eval" and asked.body["model"].startswith("policy@v2"):
            wait_until(lambda: len(run.steps) > 2, 30.0, "the next step has begun beside it")
            if compiler.job is not None:
                arbor.shutdown_job(compiler.job.id)
            moment.wait(0.5)  # in which it could be left behind
        return plain(asked)

    run.answer = answer
    compiler.compile(student(run), trainset=examples(2), valset=examples(2))
    assert len(run.steps) < 50 and list(compiler.validation_scores)[:2] == [-1, 1]


def test_a03_shut_down_before_its_first_step_a_job_is_no_failure(run: SmallRun) -> None:
    compiler = optimizer(num_train_steps=5)
    begun = threading.Event()

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        for job_id in jobs.ids():
            arbor.shutdown_job(job_id)
        begun.set()
        return 1.0

    compiler.metric = metric
    program = compiler.compile(student(run), trainset=examples(2), valset=examples(2))
    assert begun.is_set() and not run.steps and program.lm.model.startswith("policy@v0")


def test_a_training_that_fails_is_a_failed_job(run: SmallRun) -> None:
    run.fail_step = "out of memory"
    compiler = optimizer()
    with pytest.raises(Exception, match="out of memory"):
        compiler.compile(student(run), trainset=examples(1))
    assert compiler.job is not None and compiler.job.status == "failed"
    assert "StepFailed" in (compiler.job.failure or "")


def test_n07_arbors_users_are_told_of_the_runs_lms_in_arbors_words(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    others = dspy.Predict("english -> french")
    others.set_lm(dspy.LM("openai/gpt-5-mini"))
    with pytest.raises(ValueError, match="nothing would be trained") as refused:
        optimizer().compile(others, trainset=examples(1))
    program = dspy.Predict("english -> french")
    optimizer().compile(program, trainset=examples(1))
    told = capfd.readouterr().err + str(refused.value)
    assert "PolicyLM" not in told
    named = re.findall(r'dspy\.LM\("(\S+?)", provider=ArborProvider\(\), ', told)
    assert sorted(named) == ["openai/arbor:base", "openai/arbor:policy"]
    for name in named:
        server.check_model(run.session(), name)


def test_watch_job_from_another_thread_sees_the_whole_training(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler, seen = optimizer(num_train_steps=3), []

    def watch() -> None:
        wait_until(lambda: bool(jobs.ids()), 30.0, "a job has begun")
        arbor.watch_job(jobs.ids()[0], 60, 0.05)
        seen.append(True)

    watching = threading.Thread(target=watch)
    watching.start()
    compiler.compile(student(run), trainset=examples(2))
    watching.join(60)
    out = capsys.readouterr().out
    assert seen and out.count("  step ") == 3 and out.splitlines()[-1].endswith("succeeded")


# ------------------------------------------------------------------ A9


class Answering(dspy.Module):
    """As the blog writes one: without super().__init__()."""

    def __init__(self) -> None:
        self.answer = dspy.ChainOfThought("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(question=question)


@pytest.mark.process  # imports LiteLLM, which takes seconds
def test_a09_the_blogs_calls_train_and_its_evaluations_are_never_trainable(run: SmallRun) -> None:
    def answer(asked: Asked) -> str:
        word = "Paris" if len(asked.tag("rollout") or "x") % 2 else "Lyon"
        return answering(reasoning="it is so", answer=word)(asked)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> bool:
        return example.answer.lower() in prediction.answer.lower()

    run.answer = answer
    info = arbor.init()
    arbor.start_server(run.hub_name)
    asked = dspy.LM(f"openai/arbor:{run.hub_name}", provider=ArborProvider(), api_base=info["base_url"])
    trainset = [
        dspy.Example(question="The capital of France?", answer="Paris").with_inputs("question"),
        dspy.Example(question="Where is Lyon?", answer="France").with_inputs("question"),
    ]
    devset = trainset[:50]
    with dspy.context(lm=asked):
        program = Answering()
        evaluate = dspy.Evaluate(devset=devset, metric=metric, num_threads=4, display_progress=False)
        before = evaluate(program)
        direct = list(run.asked)
        compiler = ArborGRPO(
            metric=metric, num_rollouts_per_grpo_step=4, exclude_demos=True, num_train_steps=2, num_threads=4,
        )  # fmt: skip
        optimized = compiler.compile(student=program, trainset=trainset, valset=devset)
        asked_before = len(run.asked)
        after = evaluate(optimized)
    assert 0 <= before.score <= 100 and 0 <= after.score <= 100
    assert len(direct) == 2 and {it.tag("purpose") for it in direct} == {"eval"}
    rewards = {
        it.reward for request in run.requests.values() for group in request.groups for it in group.members
    }
    assert rewards <= {0.0, 1.0}
    trained = {
        it.rollout for request in run.requests.values() for group in request.groups for it in group.members
    }
    assert trained and not trained & {it.tag("rollout") for it in direct}
    asked_after = run.asked[asked_before:]
    assert len(asked_after) == 2 and {it.tag("purpose") for it in asked_after} == {"eval"}


@pytest.mark.process
@pytest.mark.parametrize("kind", [ArborGRPO, GRPO], ids=["arbor", "dspy"])
@pytest.mark.parametrize("document", [QUICKSTART, PAPILLON], ids=["quickstart", "papillon"])
def test_s02_dapo_in_a_document_of_arbors_rolls_out_and_judges_what_was_asked_for_and_no_more(
    run: SmallRun, kind: type[GRPO], document: dict[str, Any]
) -> None:
    """Every group is flat, which is what dynamic sampling would roll out again."""
    run.drop_flat = True
    run.config = {**FITS.model_dump(include={"device", "dtype", "engines", "train_processes"})}
    run.config["train"] = {"lora": {"rank": 8}}
    judged: list[str] = []

    def judge(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        judged.append(example.english)
        return float(example.english == "word 0") * len(judged)  # one example teaches something

    settings = {"num_train_steps": 3, "num_dspy_examples_per_grpo_step": 4, "num_rollouts_per_grpo_step": 5}
    program = student(run)
    kind(judge, train_kwargs=document, exclude_demos=True, **settings).compile(program, trainset=examples(4))
    rollouts = {it.tag("rollout") for it in run.asked}
    assert len(rollouts) == len(run.asked) == len(judged) == 3 * 4 * 5
    said = [it.settings for it in run.requests.values() if it.settings is not None]
    assert {(it.loss, it.clip_low, it.clip_high) for it in said} == {("dapo", 0.2, 0.2)}
