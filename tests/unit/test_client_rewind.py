"""A machine lost under a living program: it goes back to the last durable step, and nothing is doubled."""

from __future__ import annotations

from collections import Counter

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, TrainingFailed, group
from launcher.client.failures import Rewound
from tests.support.small_run import Asked, SmallRun, answering

GOOD = answering(french="bonjour")


def train(run: SmallRun, **changes: object) -> GRPO:
    """Five steps of two examples times four rollouts, validated every second step."""
    settings: dict[str, object] = {
        "num_train_steps": 5,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
        "num_steps_for_val": 2,
        "num_threads": 1,
        "seed": 4,
    }
    student = dspy.Predict("english -> french")
    student.set_lm(PolicyLM(run.session()))
    grpo = GRPO(lambda example, prediction, trace=None: 1.0, **{**settings, **changes})  # type: ignore[arg-type]
    data = [dspy.Example(english=f"word {i}", french=f"mot {i}").with_inputs("english") for i in range(6)]
    grpo.compile(student, trainset=data, valset=data[:2])
    return grpo


def losing_the_machine(run: SmallRun, when: int, to_step: int) -> None:
    """The machine goes before the answer to the request number `when`."""
    asked = Counter[str]()

    def answer(request: Asked) -> str | tuple[int, dict[str, object]]:
        asked["all"] += 1
        if asked["all"] == when:
            with run.lock:
                run.lose_machine(to_step)
        return GOOD(request)

    run.answer = answer


def losing_the_machine_before(run: SmallRun, when: int, to_step: int) -> None:
    """The machine has gone, and another answers, when the request number `when` arrives there."""
    complete = run.complete

    def by_the_new_one(asked: Asked) -> tuple[int, dict[str, object], dict[str, str]]:
        with run.lock:
            if len(run.asked) == when - 1 and run.machine == 1:
                run.lose_machine(to_step)
        return complete(asked)

    run.complete = by_the_new_one  # type: ignore[method-assign]


def rollouts_of(run: SmallRun) -> list[list[str]]:
    return [
        [member.rollout for group in request.groups for member in group.members]
        for _, request in sorted(run.requests.items())
    ]


@pytest.mark.process
def test_g21_a_machine_lost_in_mid_step_costs_the_steps_since_the_durable_one_and_no_more(
    run: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    # 2 of validation, 3 steps of 8 and 2 of validation after two of them: the third of step 4's rollouts.
    losing_the_machine(run, 2 + 3 * 8 + 2 + 3, to_step=2)
    grpo = train(run)

    assert [request.client_state["step"] for _, request in sorted(run.requests.items())] == [1, 2, 3, 4, 5]  # type: ignore[index]
    assert grpo.summary["steps"] == 5
    assert grpo.report.rewinds == 1
    trained = [rollout for step in rollouts_of(run) for rollout in step]
    assert len(trained) == len(set(trained)) == 5 * 8
    assert not run.lost & set(trained[2 * 8 :]), "of the lost machine only what was durable is trained"
    kinds = [(it["kind"], it.get("step", it.get("to"))) for it in grpo.history]
    assert ("rewind", 2) in kinds
    assert [step for kind, step in kinds if kind == "step"] == [1, 2, 3, 3, 4, 5]
    said = capsys.readouterr().err
    assert "the machine was lost: back from step 3 to step 2, rolling out again" in said


@pytest.mark.process
@pytest.mark.parametrize(
    ("when", "back"),
    [(2 + 3 * 8 + 2 + 1, 3), (2 + 5 * 8 + 2 * 2 + 1, 5)],
    ids=["a step's first rollout", "the last validation"],
)
def test_g21_a_machine_lost_where_nothing_of_it_was_asked_for_yet_is_noticed_by_its_older_weights(
    run: SmallRun, when: int, back: int
) -> None:
    """All that is asked is answered by the new machine, and nothing of it is unknown there."""
    losing_the_machine_before(run, when, to_step=2)
    grpo = train(run)
    assert [it for it in grpo.history if it["kind"] == "rewind"] == [
        {"kind": "rewind", "from": back, "to": 2}
    ]
    assert [request.client_state["step"] for _, request in sorted(run.requests.items())] == [1, 2, 3, 4, 5]  # type: ignore[index]
    assert (grpo.summary["version"], run.version) == (5, 5)


def test_a_rollout_begun_on_the_lost_machine_is_not_mixed_with_one_of_the_new(run: SmallRun) -> None:
    losing_the_machine(run, 2 + 4, to_step=0)
    train(run, num_train_steps=1)

    samples = Counter(asked.tag("rollout") for asked in run.asked if asked.tag("purpose") != "eval")
    (trained,) = rollouts_of(run)
    assert {samples[rollout] for rollout in trained} == {1}


@pytest.mark.process
def test_best_and_scores_are_those_of_the_durable_step(run: SmallRun) -> None:
    losing_the_machine(run, 2 + 3 * 8 + 2 + 3, to_step=1)
    grpo = train(run)

    validated = [it["step"] for it in grpo.history if it["kind"] == "validation"]
    assert validated == [0, 2, 2, 4, 5], "the one after step 2 was lost with it, and is made again"
    assert run.client_state is not None
    assert [it["step"] for it in run.client_state["scores"]] == [0, 2, 4]


def test_a_machine_that_is_lost_again_and_again_ends_the_training(run: SmallRun) -> None:
    def answer(request: Asked) -> str:
        with run.lock:
            run.lose_machine(0)
        return GOOD(request)  # type: ignore[return-value]

    run.answer = answer
    with pytest.raises(TrainingFailed, match="rewound 3 times"):
        train(run, num_steps_for_val=5)


def test_a_step_that_was_taken_in_and_is_unknown_now_was_lost(run: SmallRun) -> None:
    session = run.session()
    run.refuse_empty = False
    first = session.step([group("a", {"r1": 1.0})], client_state={"at": 1})
    second = session.step([group("b", {"r2": 1.0})], client_state={"at": 2}, wait=False)
    run.lose_machine(first.id)
    with pytest.raises(Rewound, match="rewound to step 1") as lost:
        session.wait(second.id)
    assert lost.value.client_state == {"at": 1}
    assert (lost.value.status, lost.value.error["step"]) == (409, 1)
