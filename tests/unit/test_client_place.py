"""Whose work is taken up, and whose is not: a restarted program's own, and nobody else's."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, TrainingFailed
from launcher.client.dspy.training_place import PROGRAM_VARIABLE, OptimizerWork, Place, Validated, digest_of
from launcher.records import endpoint
from tests.support import abuses as a
from tests.support.lives import RUN, be_another_process, begin_life
from tests.support.small_run import Asked, SmallRun, answering


def examples(count: int, french: str = "mot") -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french=french).with_inputs("english") for i in range(count)]


def train(steps: int, size: int = 4, metric: Any = a.length, **changes: Any) -> GRPO:
    settings: dict[str, Any] = {
        "num_train_steps": steps,
        "num_dspy_examples_per_grpo_step": 2,
        "num_rollouts_per_grpo_step": 4,
        "num_steps_for_val": 1,
    }
    grpo = GRPO(metric, **{**settings, **changes})
    grpo.compile(a.predict(), trainset=examples(size), valset=examples(2))
    return grpo


@pytest.fixture
def run(run: SmallRun) -> SmallRun:
    run.answer = a.varied
    return run


def other_metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return 2.0 * len(prediction.french)


@pytest.mark.process
@pytest.mark.parametrize(
    "changes", [{}, {"metric": other_metric}, {"size": 6}], ids=["process", "metric", "size"]
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_g21_a_second_program_on_one_endpoint_trains_all_its_own_steps(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], by_hand: bool
) -> None:
    """By hand on an endpoint that is held, or as the second of two in one `launch -- sh`."""
    begin = be_another_process if by_hand else begin_life
    begin(monkeypatch)
    train(3)
    begin(monkeypatch)
    second = train(2, **changes)
    assert len(run.requests) == 5
    assert (second.summary["steps"], second.report.steps) == (2, 2)
    assert second.report.trained == 16


@pytest.mark.process
def test_g21_a_program_of_another_run_is_not_taken_for_this_one(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch, run="slip-00000001")
    train(2)
    begin_life(monkeypatch, 2)
    train(2)
    assert len(run.requests) == 4


@pytest.mark.process
def test_g21_what_was_trained_by_hand_is_not_taken_up_by_a_program_of_launch(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_another_process(monkeypatch)
    train(2)
    begin_life(monkeypatch, 2)
    train(2)
    assert len(run.requests) == 4


@pytest.mark.process
def test_g21_a_restarted_program_that_was_changed_begins_anew_and_says_what_differs(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_life(monkeypatch)
    train(2)
    begin_life(monkeypatch, 2)
    train(2, size=6, metric=other_metric)
    assert len(run.requests) == 4
    said = capfd.readouterr().err
    assert "starting at step 0 with the policy as it is now (v2): what was trained before" in said
    assert "metric 'length' -> 'other_metric', examples 4 -> 6" in said


@pytest.mark.process
def test_g21_what_was_left_is_taken_up_where_it_is_asked_for(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    be_another_process(monkeypatch)
    train(2)
    be_another_process(monkeypatch)
    train(5, resume=True)
    assert len(run.requests) == 5
    assert "resuming after 2 of 5 steps" in capfd.readouterr().err


@pytest.mark.process
def test_g21_of_two_optimizers_the_one_that_was_under_way_is_taken_up(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_another_process(monkeypatch)
    train(1), train(1, seed=1)
    be_another_process(monkeypatch)
    train(1, resume=True), train(3, seed=1, resume=True)
    assert len(run.requests) == 1 + 3


@pytest.mark.parametrize(
    ("steps", "size", "says"),
    [
        (
            2,
            4,
            r"nothing left to train\nthe run has done 2 steps of this work, 2 are asked for\nHint: num_train",
        ),
        (
            5,
            6,
            r"nothing to resume\nthe run's last step is different work: examples 4 -> 6\nHint: without",
        ),
    ],
)
def test_g21_a_resume_that_would_train_nothing_is_an_error(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, steps: int, size: int, says: str
) -> None:
    be_another_process(monkeypatch)
    train(2)
    with pytest.raises(TrainingFailed, match=says):
        train(steps, size, resume=True)
    assert len(run.requests) == 2


def test_g21_a_resume_without_anything_to_resume_is_an_error(run: SmallRun) -> None:
    with pytest.raises(TrainingFailed, match="was not made by an optimizer"):
        train(2, resume=True)
    assert not run.asked


@pytest.mark.process
def test_g21_what_another_version_of_launch_has_left_is_not_passed_over_in_silence(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_life(monkeypatch)
    train(2)
    older = {"schema": 1, "by": "slipway.GRPO", "fingerprint": "f", "seed": 0, "compile": 0, "step": 2}
    run.client_state = older
    begin_life(monkeypatch, 2)
    train(1)
    said = "made by a different version of launch"
    assert said in capfd.readouterr().err
    run.client_state = older
    with pytest.raises(TrainingFailed, match=said):
        train(3, resume=True)


@pytest.mark.process
def test_g21_a_restarted_program_can_be_told_to_begin_anew(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_life(monkeypatch)
    train(2)
    begin_life(monkeypatch, 2)
    train(2, resume=False)
    assert len(run.requests) == 4


def known(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
    """None where the example has no answer to compare with."""
    return float(len(prediction.french)) if example.french else None


@pytest.mark.parametrize(
    ("before", "taught"), [(["varied"], True), (["alike"], False), (["varied", "alike"], True)]
)
def test_g21_a_resumed_training_ends_as_if_it_had_never_been_stopped(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, before: list[str], taught: bool
) -> None:
    """Its last two steps have nothing to train on: what its first life taught is what there is."""

    def answer(asked: Asked) -> Any:
        kind = before[min(run.version, len(before) - 1)]
        return a.varied(asked) if kind == "varied" else answering(french="mot")(asked)

    def train_on(steps: int, trainset: list[dspy.Example]) -> GRPO:
        grpo = GRPO(
            known, num_train_steps=steps, num_dspy_examples_per_grpo_step=1, num_rollouts_per_grpo_step=4
        )
        grpo.compile(a.predict(), trainset=trainset)
        return grpo

    run.answer, run.drop_flat = answer, True
    begin_life(monkeypatch)
    with contextlib.nullcontext() if taught else pytest.raises(TrainingFailed, match="Nothing was trained"):
        train_on(len(before), examples(4))
    begin_life(monkeypatch, len(before))
    steps, unknown = len(before) + 2, examples(4, french="")
    if taught:
        assert train_on(steps, unknown).summary["steps"] == steps
    else:
        with pytest.raises(TrainingFailed, match=f"Nothing was trained in {steps} steps"):
            train_on(steps, unknown)
    assert (len(run.requests), len(run.empty)) == (before.count("varied"), before.count("alike"))


def best_after(run: SmallRun, step: int) -> Any:
    """Held-out answers are longest while the version after `step` is served."""
    lengths = {step: 9}

    def answer(asked: Asked) -> str:
        if asked.tag("purpose") != "eval":
            return a.varied(asked)
        return answering(french="x" * lengths.get(run.version, 3))(asked)

    return answer


@pytest.mark.process
def test_c54_a_training_that_is_extended_serves_its_best_checkpoint_again(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life has served step 1's again, and the steps after that made it a thing of the past."""
    run.answer = best_after(run, 1)
    begin_life(monkeypatch)
    train(2)
    assert run.restored == ["step-000001"]
    begin_life(monkeypatch, 3)
    extended = train(4)
    assert run.restored == ["step-000001", "step-000001"]
    assert extended.summary["restored"] == "step-000001"
    assert (extended.summary["steps"], len(run.requests)) == (4, 4)


@pytest.mark.process
def test_g21_after_an_alarm_stopped_it_a_restarted_program_has_not_finished(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served again at the end carries the steps that were done, not those that were asked for."""
    run.answer = best_after(run, 1)
    begin_life(monkeypatch)
    with pytest.raises(TrainingFailed, match="Training stopped after 3 of 6 steps"):
        train(6, on_alarm="stop", alarms={"length": 0.5})
    assert run.client_state is not None and run.client_state["step"] == 3
    begin_life(monkeypatch, 4)
    assert train(6).summary["steps"] == 6
    assert len(run.requests) == 6


# ----------------------------------------------------------------- what it is made of


def work(**changes: Any) -> OptimizerWork:
    fields: dict[str, Any] = {"program": "p.py", "metric": "m", "predictors": ("self",), "examples": 4}
    return OptimizerWork(**{**fields, "seed": 0, "examples_per_step": 2, "rollouts": 4, **changes})


@pytest.mark.process
def test_a_place_fits_its_step_however_long_it_lasts_and_however_much_is_held_out() -> None:
    place = Place(work(), life=f"{RUN}@0", held_out="digest")
    for step in range(1000):
        validated = Validated(step, 0.123456789012345 + step, 0.98765432109876, f"step-{step:06d}")
        place.add(validated, [-1.23457e-05] * 20_000)
    text = json.dumps(place.client_state(1000))
    assert len(text.encode()) < 60_000
    begun = Place(work(), life=f"{RUN}@1000", held_out="digest").restarted(json.loads(text), {})
    assert begun is not None and begun.best == place.best and begun.best_scores is not None
    assert len(begun.best_scores) == 20_000


def test_g21_killed_while_its_first_step_trains_a_life_is_told_from_the_next(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both are resumed after step 1: the step that the killed one has sent is committed in the next."""
    door = endpoint.LocalEndpoint("http://127.0.0.1:1", "token", RUN, tmp_path, 180.0)
    begin_life(monkeypatch)
    train(1)
    for steps in (2, 3):
        begin_life(monkeypatch, 1)
        monkeypatch.setenv(PROGRAM_VARIABLE, door.environ({}, 1)[PROGRAM_VARIABLE])
        train(steps)
    assert len(run.requests) == 3


def test_another_validation_set_leaves_the_old_scores_behind() -> None:
    place = Place(work(), life=f"{RUN}@0", held_out="digest")
    place.add(Validated(0, 1.0, 1.0), [1.0, 1.0])
    state = place.client_state(3)
    begun = Place(work(), life=f"{RUN}@3", held_out="another").restarted(state, {})
    assert begun is not None and (begun.step, begun.scores, begun.best) == (3, [], None)


def test_a_validation_set_has_one_name_in_every_process(tmp_path: Path) -> None:
    held_out = [{"english": "hi", "of": object(), "words": {"a", "b"}, "at": tmp_path}]
    assert digest_of(held_out) == digest_of([{**held_out[0], "of": object()}])
    assert digest_of(held_out) != digest_of([{**held_out[0], "english": "ho"}])


def test_only_the_program_that_launch_starts_is_given_its_life(tmp_path: Path) -> None:
    assert endpoint.PROGRAM_VARIABLE == PROGRAM_VARIABLE
    door = endpoint.LocalEndpoint("http://127.0.0.1:1", "token", RUN, tmp_path, 180.0)
    lives = [door.environ({}, step)[PROGRAM_VARIABLE] for step in (0, 12, 12)]
    assert [it.rpartition(".")[0] for it in lives] == [f"{RUN}@0", f"{RUN}@12", f"{RUN}@12"]
    assert PROGRAM_VARIABLE not in door.exports()


def test_a_validation_set_has_a_name_whatever_its_fields_hold() -> None:
    board = [{"board": {(0, 1): "x"}, "of": object(), "turns": [("a", 1), None]}]
    assert digest_of(board) == digest_of([{**board[0], "of": object()}])
    assert digest_of(board) != digest_of([{**board[0], "board": {(1, 0): "x"}}])
