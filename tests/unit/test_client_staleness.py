"""GRPO with staleness: how old what is trained is, what a straggler costs, and what is sent ahead."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, StepFailed, TrainingFailed
from launcher.client.dspy import rollout_collector, validation
from tests.support.lives import begin_life
from tests.support.pretend_rollouts import (
    Twice,
    data,
    key_of,
    metric,
    mostly_flat,
    optimizer,
    plain,
    train,
)
from tests.support.small_run import Asked, SmallRun
from tests.support.staleness import PATIENCE, E, Held, K, Pools, journal, lags, of_training, trained

_moment = threading.Event()


def counted_by(grpo: GRPO) -> int:
    """The rollouts that it has counted: in its steps, too old for them, or left at the end."""
    return grpo.report.rollouts + grpo.report.rollouts_stale + grpo.report.rollouts_unused


class Gate:
    """Answers wait until so many have been asked for."""

    def __init__(self, run: SmallRun, requests: int) -> None:
        self._run, self._requests = run, requests
        self._open = threading.Event()

    def __call__(self, asked: Asked) -> Any:
        if of_training(asked):
            with self._run.lock:
                if sum(of_training(it) for it in self._run.asked) >= self._requests:
                    self._open.set()
            assert self._open.wait(PATIENCE)
        return plain(asked)


@pytest.mark.process
def test_c39_nothing_is_trained_that_is_older_than_staleness_and_each_lag_is_recorded(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.answer = Gate(run, 3 * E * K)  # three steps' worth is asked for before one is trained
    grpo = train(run, staleness=2, num_train_steps=6)
    found = lags(run)
    assert found[0] == {0: E * K} and found[1] == {1: E * K} and found[2] == {2: E * K}
    assert all(max(it) <= 2 for it in found)
    history = [it for it in grpo.history if it["kind"] == "step"]
    lines = [json.loads(it) for it in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    for recorded in (history, [it for it in lines if it["kind"] == "step"]):
        assert [{int(lag): count for lag, count in it["lags"].items()} for it in recorded] == found
    assert f"{E * K} of {E * K} up to 2 steps old" in capsys.readouterr().err
    assert [len(it) for it in trained(run)] == [E] * 6
    assert counted_by(grpo) == len({it.tag("rollout") for it in run.asked if of_training(it)})


@pytest.mark.process
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_c39_no_example_is_begun_more_than_staleness_steps_ahead(
    run: SmallRun, pools: Pools, staleness: int
) -> None:
    ahead: list[int] = []

    def answer(asked: Asked) -> Any:
        if of_training(asked):
            ahead.append(key_of(asked.tag("rollout") or "")[0] - (asked.version or 0))
        return plain(asked)

    seen = threading.Event()

    def before_wait(number: int) -> None:
        """A step trains until the last that may be begun meanwhile was begun, and is done: none is stale."""
        wanted = min(number - 1 + staleness, 4)
        for _ in range(PATIENCE * 100):
            with run.lock:
                steps = {key_of(it.tag("rollout") or "")[0] for it in run.asked if of_training(it)}
            if wanted in steps:
                return pools.settle(lambda _: False)
            seen.wait(0.01)
        raise AssertionError(f"step {wanted} was not begun while {number - 1} trained")

    run.answer, run.before_wait = answer, before_wait
    train(run, staleness=staleness)
    assert max(ahead) == staleness


class Proving:
    """Engines that have a version proven only once the step after it was sent; `what` it saw of each."""

    def __init__(self, run: SmallRun, last: int) -> None:
        self._run, self._last = run, last
        self.what: dict[int, tuple[bool, int]] = {}

    def __call__(self, number: int) -> None:
        sent, patience = threading.Event(), 0 if self.in_vain else PATIENCE
        for _ in range(patience * 100 if number < self._last else 0):
            if number + 1 in self._run.requests:
                break
            sent.wait(0.01)
        with self._run.lock:
            asked = [key_of(it.tag("rollout") or "")[0] for it in self._run.asked if of_training(it)]
            self.what[number] = number + 1 in self._run.requests, max(asked)

    @property
    def in_vain(self) -> bool:
        return not all(was_sent for was_sent, _ in self.what.values())


@pytest.mark.process
def test_c39_the_next_step_is_sent_while_a_version_is_proven_and_nothing_is_begun_for_it(
    run: SmallRun,
) -> None:
    run.before_served = proving = Proving(run, last=5)
    grpo = train(run, staleness=1, num_train_steps=5, num_steps_for_val=9)
    # Of the steps, counted from 0: that after a version samples it, and is not begun before it is served.
    assert proving.what == {number: (True, number) for number in range(1, 5)} | {5: (False, 4)}
    assert all(max(it) <= 1 for it in lags(run))
    steps = [it for it in grpo.history if it["kind"] == "step"]
    assert [{int(lag): count for lag, count in it["lags"].items()} for it in steps] == lags(run)
    assert [it["version"] for it in steps] == [1, 2, 3, 4, 5]


@pytest.mark.process
def test_a_version_that_is_not_served_after_all_ends_the_training_and_the_step_after_it_is_kept(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proving = Proving(run, last=3)

    def fail(number: int) -> None:
        proving(number)
        if number == 2:
            run.steps[number] |= {"state": "failed", "error": "committed, but not published: engine-0"}

    run.before_served = fail
    begin_life(monkeypatch)
    with pytest.raises(StepFailed, match="Step 2 failed") as failed:
        train(run, staleness=1, num_train_steps=6, num_steps_for_val=9)
    assert failed.value.why == "committed, but not published: engine-0"
    hint = failed.value.hint or ""
    assert "step-000002 is kept" in hint and "`launch --resume run-1`" in hint
    assert not proving.in_vain and sorted(run.requests) == [1, 2, 3]
    # The third had been sent: it is trained, and its line is there.
    assert [(it["step"], it["version"]) for it in journal(tmp_path, "step")] == [(1, 1), (2, 2), (3, 3)]
    run.before_served = lambda _: None
    begin_life(monkeypatch, after_step=3)
    train(run, staleness=1, num_train_steps=6, num_steps_for_val=9)
    assert [it["step"] for it in journal(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    rewarded = [it.rollout for step in run.requests.values() for group in step.groups for it in group.members]
    assert len(rewarded) == len(set(rewarded)) == 6 * E * K and sorted(run.requests) == [*range(1, 7)]


@pytest.mark.process
def test_a_straggler_holds_no_step_up_and_is_left_out_by_name(
    run: SmallRun, held: Held, pools: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: Asked) -> Any:
        if (asked.tag("rollout") or "").endswith("-s1-e1-k2"):
            held.hold()
        return plain(asked)

    run.answer, run.before_wait = answer, lambda _: pools.settle(lambda key: key == (1, 1))
    grpo = train(run, staleness=2, num_train_steps=8)
    assert not held.in_vain
    keys = [key for step in trained(run) for key in step]
    assert set(keys) == {(number // E, number % E) for number in range(8 * E + 1)} - {(1, 1)}
    assert len(keys) == 8 * E
    report = grpo.report
    assert (report.groups_stale, report.rollouts_stale) == (1, K)
    assert counted_by(grpo) == len({it.tag("rollout") for it in run.asked if of_training(it)})
    said = capsys.readouterr().err
    assert "1 example left out as stale before step" in said
    (late,) = (it for it in grpo.history if it["kind"] == "step" and it["groups_stale"])
    assert late["groups_stale"] == 1
    assert [
        f"step {late['step']}/8" in it for it in said.splitlines() if "left out 1 example as too old" in it
    ] == [True]
    assert all(max(it) <= 2 for it in lags(run))


@pytest.mark.process
def test_slow_ones_that_gather_in_one_step_do_not_end_the_training(
    run: SmallRun, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done leaves before them, until they have all places."""
    left = threading.Event()

    def checked(finished: Any, *given: Any) -> None:
        if all(it.outcome == "overdue" for it in finished):
            left.set()
        validation.raise_if_unanswered(finished, *given)

    def answer(asked: Asked) -> Any:
        step = key_of(asked.tag("rollout") or "")[0] if of_training(asked) else 0
        if step:
            (held if step == 1 else left).wait(PATIENCE)
        return plain(asked)

    run.answer = answer
    monkeypatch.setattr(rollout_collector, "raise_if_unanswered", checked)
    grpo = train(run, staleness=1, num_train_steps=4, valset=0, num_threads=E * K, rollout_seconds=3)
    assert grpo.report.outcomes == {"scored": 3 * E * K, "overdue": E * K}
    assert (grpo.report.steps, grpo.report.empty_steps) == (3, 1)


def test_a_straggler_that_is_not_too_old_yet_goes_into_a_later_step(run: SmallRun, held: Held) -> None:
    def answer(asked: Asked) -> Any:
        if (asked.tag("rollout") or "").endswith("-s0-e1-k2"):
            held.hold()
        return plain(asked)

    def before_wait(number: int) -> None:
        """The first step trains until the straggler's answer has been received, and a little longer."""
        held.set()

    run.answer, run.before_wait = answer, before_wait
    grpo = train(run, staleness=2, num_train_steps=2)
    first, second = trained(run)
    assert (0, 1) not in first
    assert (0, 1) in second, "of the last step there is no later one, so that it waits"
    assert grpo.report.groups_stale == 0


def over_a_swap(run: SmallRun, to: int) -> Any:
    """The first answers of one example are on their way until version `to` is served; then its runs go on."""

    def answer(asked: Asked) -> Any:
        is_of_it = of_training(asked) and key_of(asked.tag("rollout") or "") == (1, 0)
        if is_of_it and asked.tag("predictor") == "write":
            for _ in range(PATIENCE * 100):
                if run.version >= to:
                    break
                _moment.wait(0.01)
        return plain(asked)

    return answer


@pytest.mark.process
def test_c39_a_rollout_over_a_swap_has_the_lag_of_each_of_its_answers(run: SmallRun) -> None:
    run.answer = over_a_swap(run, 2)
    grpo = train(run, Twice(), staleness=2, num_train_steps=3)
    assert (1, 0) in trained(run)[2], "of the last step there is no later one, so that it waits"
    found = lags(run)
    history = [it for it in grpo.history if it["kind"] == "step"]
    assert [{int(lag): count for lag, count in it["lags"].items()} for it in history] == found
    versions = {
        (it.tag("predictor"), it.version)
        for it in run.asked
        if of_training(it) and key_of(it.tag("rollout") or "") == (1, 0)
    }
    assert versions == {("write", 0), ("judge", 2)}
    assert found[2][2] >= K and found[2][0] >= K


@pytest.mark.process
def test_c39_a_rollout_over_a_swap_is_as_old_as_its_oldest_answer(run: SmallRun) -> None:
    scored = threading.Semaphore(0)

    def counted(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float | None:
        scored.release()
        return metric(example, prediction)

    def before_wait(number: int) -> None:
        """The third step trains until all four steps' rollouts are done."""
        for _ in range(4 * E * K if number == 3 else 0):
            assert scored.acquire(timeout=PATIENCE)

    run.answer, run.before_wait = over_a_swap(run, 3), before_wait
    grpo = train(run, Twice(), metric=counted, valset=0, staleness=2, num_train_steps=4, checkpoint="none")
    assert (1, 0) not in [key for step in trained(run) for key in step]
    assert (grpo.report.groups_stale, grpo.report.rollouts_stale) == (1, K)
    assert all(max(it) <= 2 for it in lags(run))


@pytest.mark.process
def test_a22_dynamic_sampling_goes_on_under_staleness_and_every_rollout_is_counted(run: SmallRun) -> None:
    run.answer, run.drop_flat = mostly_flat, True
    grpo = train(run, staleness=2, num_train_steps=8, dynamic_sampling=True)
    steps = [request for _, request in sorted(run.requests.items())]
    varied = [sum(len({it.reward for it in group.members}) > 1 for group in step.groups) for step in steps]
    assert varied == [E] * 8
    keys = [key for step in trained(run) for key in step]
    assert len(set(keys)) == len(keys)
    report = grpo.report
    assert report.rollouts == report.samples == len(keys) * K
    assert report.groups_again > 0
    assert counted_by(grpo) == len({it.tag("rollout") for it in run.asked if of_training(it)})
    assert all(max(it) <= 2 for it in lags(run))


@pytest.mark.process
def test_validations_and_rollouts_share_one_bound(run: SmallRun) -> None:
    lock, under_way, most = threading.Lock(), [0], [0]

    def answer(asked: Asked) -> Any:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        _moment.wait(0.002)
        with lock:
            under_way[0] -= 1
        return plain(asked)

    run.answer = answer
    train(run, staleness=2, num_threads=3, num_steps_for_val=1, num_train_steps=3)
    assert most[0] == 3
    most[0] = 0
    run.places = 2
    train(run, staleness=2, num_steps_for_val=1, num_train_steps=3)
    assert most[0] == 2


def test_c39_more_staleness_than_the_run_trains_is_refused_with_the_line_that_fits(run: SmallRun) -> None:
    run.max_staleness = 2
    student = dspy.Predict("english -> french")
    student.set_lm(PolicyLM(run.session()))
    with pytest.raises(TrainingFailed, match="staleness=3") as refused:
        optimizer(staleness=3).compile(student, trainset=data(3))
    assert "--set max_staleness=3" in str(refused.value)
    assert not run.asked
