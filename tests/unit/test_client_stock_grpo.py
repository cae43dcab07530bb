"""DSPy's own GRPO on the policy, as it comes (A11); and what is asked outside rollouts is never trained."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import pytest
from dspy.clients.provider import Provider, ReinforceJob
from dspy.clients.utils_finetune import TrainDataFormat
from dspy.teleprompt import grpo as dspys

from launcher.client import GRPO, EndpointLost, PolicyLM, StepFailed, TrainingFailed, rollout
from launcher.client.dspy.provider import SlipwayProvider
from tests.support import abuses as a
from tests.support.lives import begin_life
from tests.support.small_run import TOKEN, Asked, SmallRun, answering

pytestmark = pytest.mark.usefixtures("warm")

_numbers = itertools.count()


def differently(asked: Asked) -> str:
    """No two answers are the same."""
    return answering(french="mot" + "x" * (next(_numbers) % 7), note=f"n{next(_numbers)}")(asked)


def all_fields(asked: Asked) -> str:
    """For a program of two parts."""
    number = next(_numbers)
    return answering(french=f"mot{number}", english=f"w{number}")(asked)


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = differently
    return run


def examples(count: int = 12) -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(count)]


def student(run: SmallRun, **settings: Any) -> Any:
    program = dspy.Predict("english -> french, note")
    program.set_lm(PolicyLM(run.session(), **settings))
    return program


def stock(**settings: Any) -> Any:
    asked = {
        "metric": a.length, "exclude_demos": True, "num_train_steps": 3, "num_threads": 4,
        "num_dspy_examples_per_grpo_step": 3, "num_rollouts_per_grpo_step": 4,
    }  # fmt: skip
    return dspys.GRPO(**asked | settings)


def test_a11_each_step_of_dspys_loop_is_one_step_of_all_its_groups(run: SmallRun) -> None:
    given = student(run, max_tokens=17)
    lm = given.lm
    program: Any = stock().compile(given, trainset=examples())
    assert program is given and program.lm is lm, "the LM is trained in place, as DSPy has it"
    assert [len(it.groups) for it in run.requests.values()] == [3, 3, 3]
    assert {len(group.members) for it in run.requests.values() for group in it.groups} == {4}
    counts = [it["counts"] for it in run.steps.values()]
    assert [(it["trained"], it["retokenised"]) for it in counts] == [(12, 0)] * 3
    assert lm.model == run.name_of(3) and run.named == ["step-000003"]
    program(english="hi")
    assert run.asked[-1].body["model"] == run.name_of(3)


@pytest.mark.process
def test_a11_each_step_samples_with_the_version_before_it(run: SmallRun) -> None:
    stock().compile(student(run), trainset=examples())
    names = list(dict.fromkeys(it.body["model"] for it in run.asked))
    assert names == ["policy@v0", run.name_of(1), run.name_of(2)]


def test_a11_groups_that_the_loop_pads_with_copies_of_its_own_members_have_each_once(run: SmallRun) -> None:
    """A rollout that another error ended is dropped by DSPy, and its group filled up with copies."""
    refused = 400, {"error": {"message": "no", "type": "x", "param": None, "code": None}}

    def sometimes(asked: Asked) -> Any:
        return refused if len(run.asked) % 5 == 0 else differently(asked)

    run.answer = sometimes
    stock(num_train_steps=2).compile(student(run), trainset=examples())
    for request in run.requests.values():
        for group in request.groups:
            said = [json.dumps([it.messages, it.completion, it.reward]) for it in group.members]
            assert len(set(said)) == len(said) <= 4
    assert any(len(group.members) < 4 for it in run.requests.values() for group in it.groups)
    assert {it["counts"]["retokenised"] for it in run.steps.values()} == {0}


# ------------------------------------------------------------------ how much of what is rolled out is trained


class Listing(ReinforceJob):
    """As a server that lists so many ids at a time; it notes what it is given."""

    listed = 1

    def initialize(self) -> None:
        self._next = itertools.count()
        self.given: list[list[Any]] = []
        self._list()
        jobs.append(self)

    def _list(self) -> None:
        self._pending = [next(self._next) for _ in range(self.listed)]

    def get_status(self) -> dict[str, Any]:
        return {"job_id": "j", "pending_batch_ids": list(self._pending)}

    def step(self, train_data: Any, train_data_format: Any = None) -> None:
        self.given.append([it["group"] for it in train_data])
        self._list()

    def terminate(self) -> None:
        pass


jobs: list[Listing] = []


def shares(listed: int | None, run: SmallRun, two_parts: bool = False) -> tuple[int, int, int]:
    """Groups rolled out, groups trained at least once, and groups handed over in all."""
    run.answer = all_fields if two_parts else differently
    program = a.Two() if two_parts else dspy.Predict("english -> french, note")
    steps, per_step = 6, 4
    if listed is None:
        program.set_lm(PolicyLM(run.session()))
    else:
        jobs.clear()
        provider = Provider()
        provider.reinforceable = True
        provider.ReinforceJob = type("Listed", (Listing,), {"listed": listed})
        lm = dspy.LM("openai/policy", api_base=run.base_url, api_key=TOKEN, provider=provider, cache=False)
        program.set_lm(lm)
    metric = a.length if not two_parts else lambda example, prediction, trace=None: 1.0
    optimizer = stock(metric=metric, num_train_steps=steps, num_dspy_examples_per_grpo_step=per_step)
    optimizer.compile(program, trainset=examples())
    rolled = steps * per_step * (2 if two_parts else 1)
    if listed is None:
        groups = [
            json.dumps([it.completion for it in g.members]) for r in run.requests.values() for g in r.groups
        ]
    else:
        groups = [json.dumps(g) for step in jobs[0].given for g in step]
    return rolled, len(set(groups)), len(groups)


@pytest.mark.process
@pytest.mark.parametrize("two_parts", [False, True])
def test_a11_no_group_that_dspys_loop_rolls_out_is_left_untrained(
    two_parts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {}
    for listed in (1, 2, None):
        run = SmallRun()
        try:
            rolled, trained, handed = shares(listed, run, two_parts)
        finally:
            run.close()
        lost[listed] = 1 - trained / rolled
        if listed is None:
            assert trained == handed == rolled, "each once"
    with capsys.disabled():
        print(
            f"\nnever trained of what DSPy's loop rolls out ({'two parts' if two_parts else 'one part'}): "
            f"{lost[1]:.0%} at 1 listed id, {lost[2]:.0%} at 2, {lost[None]:.0%} here"
        )
    assert lost[None] == 0
    assert lost[1] > lost[2] > 0.2


@pytest.mark.process
def test_a11_more_groups_than_are_listed_at_first_are_trained_in_the_end(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.client.dspy.reinforce_job._PENDING_IDS", 2)
    stock(num_train_steps=6).compile(student(run), trainset=examples())
    assert sum(len(it.groups) for it in run.requests.values()) == 6 * 3


@pytest.mark.process
def test_a11_ids_are_never_listed_twice_also_by_another_job_of_the_same_optimizer(run: SmallRun) -> None:
    optimizer = stock(num_train_steps=2)
    optimizer.compile(student(run), trainset=examples())
    optimizer.compile(student(run), trainset=examples())
    assert len(run.requests) == 4
    served = optimizer.fulfilled_batch_ids
    assert len(set(served)) == len(served) and len(served) >= 4 * 64


# ------------------------------------------------------------------ what may be trained (A9, X17, X18)


def purposes(run: SmallRun) -> list[str | None]:
    return [it.tag("purpose") for it in run.asked]


def test_a09_what_is_asked_outside_a_rollout_is_an_evaluation(run: SmallRun) -> None:
    program = student(run)
    dspy.Evaluate(devset=examples(2), metric=a.length, num_threads=2)(program)
    program.lm("hello")
    assert purposes(run) == ["eval"] * 3
    with rollout(program):
        program(english="hi")
    assert run.asked[-1].tag("purpose") is None and run.asked[-1].tag("rollout")


def test_x17_a_judge_that_is_the_policy_is_no_training_material_while_dspys_grpo_samples(
    run: SmallRun,
) -> None:
    judge = PolicyLM(run.session())

    def judged(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        judge(f"how good is {prediction.french}?")
        return a.length(example, prediction)

    stock(metric=judged, num_train_steps=2).compile(student(run), trainset=examples())
    by_purpose = {(it.tag("purpose"), "how good" in it.user) for it in run.asked}
    assert by_purpose == {("eval", True), (None, False)}


def test_x18_what_was_evaluated_before_or_after_is_never_meant_by_a_group(run: SmallRun) -> None:
    """Though it says the very same."""
    run.answer = answering(french="mot", note="n")
    program = student(run)
    dspy.Evaluate(devset=examples(), metric=a.length)(program)
    before = len(run.answered)
    stock(num_train_steps=1, num_rollouts_per_grpo_step=2).compile(program, trainset=examples())
    assert run.taken and min(run.taken) >= before
    program(english="word 1")
    assert purposes(run)[-1] == "eval"


def test_copies_of_the_lm_made_while_it_is_trained_sample_for_it_and_no_longer(run: SmallRun) -> None:
    """BestOfN asks copies of the program."""
    best = dspy.BestOfN(student(run), N=2, reward_fn=lambda args, prediction: 0.0, threshold=1.0)
    seen: list[PolicyLM] = []

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        seen.append(best.module.lm.copy())
        return a.length(example, prediction)

    stock(metric=metric, num_train_steps=1, num_dspy_examples_per_grpo_step=1).compile(
        best, trainset=examples(2)
    )
    assert set(purposes(run)) == {None}
    seen[0]("hello")
    assert purposes(run)[-1] == "eval"


def test_rollouts_sample_from_the_policy_as_it_is(run: SmallRun) -> None:
    given = student(run, temperature=0.7, top_p=0.5, extra_body={"min_p": 0.2, "chat_template_kwargs": {}})
    stock(num_train_steps=1).compile(given, trainset=examples())
    bodies = [it.body for it in run.asked]
    assert {it["temperature"] for it in bodies} == {0.7}
    assert not any({"top_p", "min_p"} & set(it) for it in bodies)
    assert all("chat_template_kwargs" in it for it in bodies)


def test_rollouts_that_would_all_be_the_same_are_refused_before_any(run: SmallRun) -> None:
    with pytest.raises(ValueError, match="the rollouts of a group would all be the same"):
        stock().compile(student(run, temperature=0.0), trainset=examples())
    assert not run.asked


@pytest.mark.parametrize("adapter", [dspy.JSONAdapter(), dspy.TwoStepAdapter(dspy.utils.DummyLM([]))])
def test_an_adapter_that_dspy_cannot_train_is_refused_by_name_before_any_rollout(
    run: SmallRun, adapter: dspy.Adapter
) -> None:
    with dspy.context(adapter=adapter), pytest.raises(NotImplementedError, match=type(adapter).__name__):
        stock().compile(student(run), trainset=examples())
    assert not run.asked


def test_a_trainers_keywords_are_asked_for_and_ride_on_each_step(run: SmallRun) -> None:
    run.meaning = {
        "settings": {"learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 2},
        "sampling": {"temperature": 0.9},
    }
    kwargs = {"learning_rate": 1e-4, "temperature": 0.9}
    stock(num_train_steps=2, train_kwargs=dict(kwargs)).compile(student(run), trainset=examples())
    assert run.train_kwargs == [kwargs]
    said = [it.settings for it in run.requests.values()]
    assert [(it.learning_rate, it.schedule_step) for it in said if it] == [(1e-4, 0), (1e-4, 1)]
    assert {it.body["temperature"] for it in run.asked} == {0.9}


# ------------------------------------------------------------------ what goes wrong


def failing(run: SmallRun) -> None:
    run.fail_step = "the loss is not finite"


def gone_after_two(run: SmallRun) -> None:
    real = run.step

    def step(request: Any) -> Any:
        if len(run.requests) == 1:
            threading.Thread(target=run.go).start()
        return real(request)

    run.step = step  # type: ignore[method-assign]


@pytest.mark.process
@pytest.mark.parametrize(
    ("trouble", "error", "cache"),
    [(failing, StepFailed, True), (failing, StepFailed, False), (gone_after_two, EndpointLost, True)],
)
def test_what_goes_wrong_is_raised_out_of_dspys_loop_and_the_lm_is_as_it_was(
    run: SmallRun, trouble: Callable[[SmallRun], None], error: type[Exception], cache: bool
) -> None:
    given = student(run, cache=cache)
    trouble(run)
    with pytest.raises(error):
        stock().compile(given, trainset=examples())
    assert given.lm.cache is cache and given.lm.grpo_job is None


@pytest.mark.process
def test_an_exception_of_the_loop_itself_ends_the_job_too(run: SmallRun) -> None:
    given = student(run, cache=True)

    def train() -> None:
        optimizer = stock()
        optimizer.select_training_sample_and_update_shuffled_trainset = None
        optimizer.compile(given, trainset=examples())

    with pytest.raises(TypeError) as raised:
        train()
    del raised
    gc.collect()
    assert given.lm.cache is True and given.lm.grpo_job is None


def test_a13_a_training_without_a_step_is_an_error(run: SmallRun) -> None:
    run.answer = lambda asked: (400, {"error": {"message": "no", "type": "x", "param": None, "code": None}})
    with pytest.raises(TrainingFailed, match="sent no step that could be trained"):
        stock(num_train_steps=1).compile(student(run), trainset=examples())


@pytest.mark.process
def test_a13_steps_of_which_nothing_can_be_trained_are_an_error_in_the_end(run: SmallRun) -> None:
    run.step = lambda request: (  # type: ignore[method-assign]
        422, {"error": {"message": "nothing", "type": "x", "param": None, "code": "nothing_to_train"}}
    )  # fmt: skip
    with pytest.raises(TrainingFailed, match="sent no step that could be trained"):
        stock(num_train_steps=2).compile(student(run), trainset=examples())
    with pytest.raises(TrainingFailed, match="Nothing could be trained in 3 steps in a row"):
        stock(num_train_steps=20).compile(student(run), trainset=examples())


@pytest.mark.process
def test_a_machine_that_is_lost_costs_the_groups_under_way_and_no_more(run: SmallRun) -> None:
    real = run.step

    def lose_once(request: Any) -> Any:
        if len(run.requests) == 2 and run.machine == 1:
            run.lose_machine(to_step=1)
            return run.rewound("these rollouts")
        return real(request)

    run.step = lose_once  # type: ignore[method-assign]
    program: Any = stock(num_train_steps=4).compile(student(run), trainset=examples())
    assert program.lm.model == run.name_of(2), "of four, one was lost with its groups and one was rewound"
    assert not program.lm.grpo_job


# ------------------------------------------------------------------ the job by itself


@pytest.fixture
def job(run: SmallRun) -> Iterator[Any]:
    job: Any = PolicyLM(run.session()).reinforce({})
    yield job
    job.cancel()


def group_of(run: SmallRun, job: Any) -> list[dict[str, Any]]:
    members = []
    for reward in (0.0, 1.0):
        messages = [{"role": "user", "content": "hi"}]
        text = job.lm("hi")[0]
        members.append(
            {"messages": messages, "completion": {"role": "assistant", "content": text}, "reward": reward}
        )
    return members


def test_a_job_lists_many_ids_and_says_where_it_stands(run: SmallRun, job: Any) -> None:
    first = job.get_status()
    assert len(first["pending_batch_ids"]) >= 64 and first["status"] == "running"
    assert first["current_model"] == job.current_model == "policy@v0"
    data = [{"batch_id": first["pending_batch_ids"][0], "group": group_of(run, job)}]
    job.step(train_data=data, train_data_format=TrainDataFormat.GRPO_CHAT)
    second = job.get_status()
    assert second["current_model"] == run.name_of(1)
    assert not set(first["pending_batch_ids"]) & set(second["pending_batch_ids"])
    job.step(train_data=data)
    assert len(run.requests) == 1, "the very group was trained"


def test_checkpoints_are_pinned_versions(run: SmallRun, job: Any) -> None:
    job.step([{"batch_id": 1, "group": group_of(run, job)}])
    job.save_checkpoint("best", score=0.5)
    assert run.named == ["step-000001"] and job.last_checkpoint == "best"
    assert job.checkpoints["best"]["model"] == run.name_of(1)
    assert job.checkpoints["best"]["metadata"] == {"score": 0.5}
    assert job.get_status()["last_checkpoint"] == "best"


def test_another_format_of_groups_is_refused_by_name(run: SmallRun, job: Any) -> None:
    with pytest.raises(ValueError, match=r"TrainDataFormat\.GRPO_CHAT"):
        job.step([{"batch_id": 1, "group": group_of(run, job)}], TrainDataFormat.CHAT)


def test_a_job_that_is_ended_twice_ends_once(run: SmallRun, job: Any) -> None:
    job.step([{"batch_id": 1, "group": group_of(run, job)}])
    job.terminate()
    job.terminate()
    assert run.named == ["step-000001"]


@pytest.mark.process
def test_a_plain_lm_of_the_run_is_trained_by_dspys_grpo(run: SmallRun) -> None:
    lm = dspy.LM("openai/policy", api_base=run.base_url, api_key=TOKEN, provider=SlipwayProvider())
    program = dspy.Predict("english -> french, note")
    program.set_lm(lm)
    stock(num_train_steps=2).compile(program, trainset=examples())
    assert lm.model == f"openai/{run.name_of(2)}" and lm.cache is True
    assert [it["counts"]["retokenised"] for it in run.steps.values()] == [0, 0]


# ------------------------------------------------------------------ restarted (A18)


def kill_after(run: SmallRun, steps: int) -> None:
    real = run.step
    gone = 500, {"error": {"message": "killed", "type": "an_error", "param": None, "code": None}}
    run.step = lambda request: real(request) if len(run.requests) < steps else gone  # type: ignore


def two(run: SmallRun, which: str) -> list[str]:
    """Two trainings of one program, in this order; the names of what came out."""
    names = []
    for kind in which.split(" then "):
        program = student(run)
        if kind == "GRPO":
            settings = {"num_dspy_examples_per_grpo_step": 2, "num_rollouts_per_grpo_step": 2}
            GRPO(a.length, num_train_steps=3, seed=len(names), **settings).compile(
                program, trainset=examples()
            )
        elif kind == "DSPy's GRPO":
            stock().compile(program, trainset=examples())
        else:
            kwargs = {"num_train_epochs": 1, "gradient_accumulation_steps": 4, "seed": len(names)}
            program = dspy.BootstrapFinetune(metric=a.length, train_kwargs=kwargs).compile(
                program, trainset=examples()
            )
        names.append(program.lm.model)
    return names


ORDERS = [
    "GRPO then GRPO",
    "GRPO then SFT",
    "SFT then GRPO",
    "SFT then SFT",
    "DSPy's GRPO then SFT",
    "SFT then DSPy's GRPO",
]


@pytest.mark.process
@pytest.mark.parametrize("killed_after", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("which", ORDERS)
def test_a18_two_trainings_killed_anywhere_are_the_same_six_steps(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, which: str, killed_after: int
) -> None:
    begin_life(monkeypatch)
    kill_after(run, killed_after)
    names: list[str] = []
    if killed_after < 6:
        with pytest.raises(Exception, match=r"killed|HTTP 500"):
            two(run, which)
        del run.step
    else:
        names = two(run, which)
    begin_life(monkeypatch, killed_after)
    again = two(run, which)
    assert len(run.requests) == 6
    assert again == [run.name_of(3), run.name_of(6)]
    assert names in ([], again)
    first, second = (kind == "SFT" for kind in which.split(" then "))
    assert [bool(it.examples) for it in run.requests.values()] == [first] * 3 + [second] * 3
