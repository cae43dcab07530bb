"""GRPO with staleness: how old what is trained is, what a straggler costs, what a restart rolls out again."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dspy
import pytest

from launcher.client import GRPO, PolicyLM, StepFailed, TrainingFailed
from launcher.client.dspy import rolling
from launcher.client.dspy.outstanding import Key
from launcher.client.dspy.pool import Pool
from tests.support.lives import begin_life
from tests.support.pretend_rollouts import (
    Twice,
    data,
    metric,
    mostly_flat,
    optimizer,
    plain,
    ticket_of,
    train,
)
from tests.support.small_run import Asked, SmallRun, answering

# Of `pretend_rollouts.optimizer`.
E, K = 3, 4
# For what a test waits for that fails: less than the client's own.
PATIENCE = 30


class Held(threading.Event):
    """`hold` waits for it; `in_vain`: how often that came to nothing, so that what should not wait has."""

    in_vain = 0

    def hold(self) -> None:
        self.in_vain += not self.wait(PATIENCE)


def trained(run: SmallRun) -> list[list[tuple[int, int]]]:
    """The tickets of each step, in the order in which they were sent."""
    steps = (request for _, request in sorted(run.requests.items()))
    return [
        list(dict.fromkeys(ticket_of(it.rollout) for group in step.groups for it in group.members))
        for step in steps
    ]


def lags(run: SmallRun) -> list[Counter[int]]:
    """Of each step's answers, how many were sampled so many steps before it, by what was answered."""
    versions: dict[str, list[int]] = {}
    for asked in run.asked:
        versions.setdefault(asked.tag("rollout") or "", []).append(asked.version or 0)
    rollouts = {
        number: [it.rollout for group in request.groups for it in group.members]
        for number, request in sorted(run.requests.items())
    }
    return [
        Counter(number - 1 - version for it in dict.fromkeys(named) for version in versions[it])
        for number, named in rollouts.items()
    ]


@pytest.fixture
def held() -> Iterator[Held]:
    """Who is held is let go when the test is over."""
    it = Held()
    yield it
    it.set()


class Pools(list[Pool]):
    """Every pool there was, the one that rolls out last."""

    def settle(self, is_late: Callable[[Key], bool]) -> None:
        """Wait until all that is begun is done, but for what is late: a step trains for so long."""
        pool = self[-1]
        workers = pool.workers

        def is_settled() -> bool:
            over = workers._stopped or workers._error is not None
            return over or all(it.ended or is_late(it.key) for it in pool._open.values())

        with workers.changed:
            assert workers.changed.wait_for(is_settled, PATIENCE)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    found = Pools()

    class Kept(Pool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(rolling, "Pool", Kept)
    return found


def ctrl_c() -> None:
    """As the keyboard has it: the program's first thread gets it, whatever it waits for."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def of_training(asked: Asked) -> bool:
    return asked.tag("purpose") != "eval"


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


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_c39_no_example_is_begun_more_than_staleness_steps_ahead(
    run: SmallRun, pools: Pools, staleness: int
) -> None:
    ahead: list[int] = []

    def answer(asked: Asked) -> Any:
        if of_training(asked):
            ahead.append(ticket_of(asked.tag("rollout") or "")[0] - (asked.version or 0))
        return plain(asked)

    seen = threading.Event()

    def before_wait(number: int) -> None:
        """A step trains until the last that may be begun meanwhile was begun, and is done: none is stale."""
        wanted = min(number - 1 + staleness, 4)
        for _ in range(PATIENCE * 100):
            with run.lock:
                steps = {ticket_of(it.tag("rollout") or "")[0] for it in run.asked if of_training(it)}
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
            asked = [ticket_of(it.tag("rollout") or "")[0] for it in self._run.asked if of_training(it)]
            self.what[number] = number + 1 in self._run.requests, max(asked)

    @property
    def in_vain(self) -> bool:
        return not all(was_sent for was_sent, _ in self.what.values())


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


def test_a_version_that_is_not_served_after_all_ends_the_training_that_waits_for_it(run: SmallRun) -> None:
    def fail(number: int) -> None:
        if number == 2:
            run.steps[number] |= {"state": "failed", "error": "committed, but not published: engine-0"}

    run.before_served = fail
    with pytest.raises(StepFailed, match="Step 2 failed") as failed:
        train(run, staleness=1, num_train_steps=6, num_steps_for_val=9)
    assert failed.value.why == "committed, but not published: engine-0"


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
    tickets = [ticket for step in trained(run) for ticket in step]
    assert set(tickets) == {(number // E, number % E) for number in range(8 * E + 1)} - {(1, 1)}
    assert len(tickets) == 8 * E
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
        is_of_it = of_training(asked) and ticket_of(asked.tag("rollout") or "") == (1, 0)
        if is_of_it and asked.tag("predictor") == "write":
            for _ in range(PATIENCE * 100):
                if run.version >= to:
                    break
                _moment.wait(0.01)
        return plain(asked)

    return answer


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
        if of_training(it) and ticket_of(it.tag("rollout") or "") == (1, 0)
    }
    assert versions == {("write", 0), ("judge", 2)}
    assert found[2][2] >= K and found[2][0] >= K


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
    assert (1, 0) not in [ticket for step in trained(run) for ticket in step]
    assert (grpo.report.groups_stale, grpo.report.rollouts_stale) == (1, K)
    assert all(max(it) <= 2 for it in lags(run))


def test_a22_dynamic_sampling_goes_on_under_staleness_and_every_rollout_is_counted(run: SmallRun) -> None:
    run.answer, run.drop_flat = mostly_flat, True
    grpo = train(run, staleness=2, num_train_steps=8, dynamic_sampling=True)
    steps = [request for _, request in sorted(run.requests.items())]
    varied = [sum(len({it.reward for it in group.members}) > 1 for group in step.groups) for step in steps]
    assert varied == [E] * 8
    tickets = [ticket for step in trained(run) for ticket in step]
    assert len(set(tickets)) == len(tickets)
    report = grpo.report
    assert report.rollouts == report.samples == len(tickets) * K
    assert report.groups_again > 0
    assert counted_by(grpo) == len({it.tag("rollout") for it in run.asked if of_training(it)})
    assert all(max(it) <= 2 for it in lags(run))


def late(run: SmallRun) -> Any:
    """The first example of every second step is late: its step has left by then."""

    def answer(asked: Asked) -> Any:
        step, index = ticket_of(asked.tag("rollout") or "") if of_training(asked) else (1, 0)
        if index == 0 and step % 2 == 0:
            for _ in range(PATIENCE * 100):
                with run.lock:
                    if len(run.requests) > step or len(run.requests) == STEPS - 1:
                        break
                _moment.wait(0.01)
        return plain(asked)

    return answer


_moment = threading.Event()
STEPS = 6


@pytest.mark.parametrize("after", range(1, STEPS))
def test_c43_killed_after_any_step_and_resumed_each_example_is_trained_once(
    run: SmallRun, pools: Pools, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    def killed(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        if len(run.requests) >= after:
            raise KeyboardInterrupt
        return float(len(prediction.french))

    killed.__qualname__ = metric.__qualname__  # it is the same work
    run.answer = late(run)
    run.before_wait = lambda _: pools.settle(lambda key: key[1] == 0 and key[0] % 2 == 0)
    begin_life(monkeypatch)
    changes: dict[str, Any] = {"staleness": 3, "num_train_steps": STEPS, "checkpoint": "none", "valset": 0}
    with pytest.raises(KeyboardInterrupt):
        train(run, metric=killed, **changes)
    done = len(run.requests)
    assert done >= after
    assert run.client_state is not None
    outstanding = run.client_state.get("pool", {}).get("tickets", [])
    assert (done % 2 == 0) or [done - 1, 0] in outstanding
    begin_life(monkeypatch, after_step=done)
    grpo = train(run, **changes)
    assert grpo.summary["steps"] == len(run.requests) == STEPS
    tickets = [ticket for step in trained(run) for ticket in step]
    assert len(tickets) == STEPS * E
    assert max(Counter(tickets).values()) == 1
    left_out = {(n // E, n % E) for n in range(max(s * E + e for s, e in tickets) + 1)} - set(tickets)
    assert all(index == 0 and step % 2 == 0 for step, index in left_out), "only those that were late"
    assert len(left_out) <= STEPS // 2
    assert all(max(it) <= 3 for it in lags(run))


@pytest.mark.slow
def test_c43_killed_at_any_moment_again_and_again_each_example_is_trained_once(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants = random.Random(7)
    left = [0]

    def killed(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return float(len(prediction.french))

    killed.__qualname__ = metric.__qualname__
    run.answer, run.drop_flat = mostly_flat, True
    lives = 0
    while len(run.requests) < STEPS + 2:
        begin_life(monkeypatch, after_step=len(run.requests))
        left[0] = instants.randrange(2 * E * K, 14 * E * K)
        lives += 1
        with suppress(KeyboardInterrupt):
            train(
                run, metric=killed, staleness=2, dynamic_sampling=True, num_train_steps=STEPS + 2, valset=0,
                checkpoint="none",
            )  # fmt: skip
        assert lives < 100
    assert lives > 5
    tickets = [ticket for step in trained(run) for ticket in step]
    assert max(Counter(tickets).values()) == 1
    states = [request.client_state or {} for _, request in sorted(run.requests.items())]
    assert [it["step"] for it in states] == list(range(1, STEPS + 3))
    assert all(max(it) <= 2 for it in lags(run))
    varied = [
        sum(len({it.reward for it in group.members}) > 1 for group in request.groups)
        for _, request in sorted(run.requests.items())
    ]
    assert varied == [E] * (STEPS + 2)


def test_g21_with_staleness_nothing_of_a_lost_machine_is_trained(run: SmallRun) -> None:
    losing = threading.Event()

    def before_wait(number: int) -> None:
        if number == 3 and not losing.is_set():
            losing.set()
            with run.lock:
                run.lose_machine(1)

    run.answer, run.before_wait = plain, before_wait
    grpo = train(run, staleness=2, num_train_steps=6, valset=0)
    assert grpo.report.rewinds == 1
    rollouts = [
        it.rollout for number, step in run.requests.items() for group in step.groups for it in group.members
    ]
    assert len(rollouts) == len(set(rollouts)) == 6 * E * K
    assert not run.lost & set(rollouts[E * K :])
    assert [len(it) for it in trained(run)] == [E] * 6


def test_g21_a_machine_lost_by_more_steps_than_staleness_is_noticed_among_the_rollouts(run: SmallRun) -> None:
    """All that its successor answers is too old: none of it would ever fill a step."""
    gone = threading.Event()
    loose = threading.Lock()

    def answer(asked: Asked) -> Any:
        if of_training(asked):
            step, _ = ticket_of(asked.tag("rollout") or "")
            if (asked.tag("rollout") or "").endswith("-s3-e2-k3") and asked.tag("predictor") == "write":
                assert gone.wait(PATIENCE)  # what this run asks next is answered by the successor
            with loose, run.lock:
                if step == 4 and not gone.is_set():  # begun when step 3 was done
                    run.lose_machine(1)
                    gone.set()
                if len(run.asked) > 1000:
                    return 500, {"error": {"message": "for ever", "type": "t", "param": None, "code": None}}
        return plain(asked)

    run.answer = answer
    grpo = train(run, Twice(), staleness=1, num_train_steps=6, valset=0)
    assert grpo.report.rewinds == 1
    assert [len(it) for it in trained(run)] == [E] * 6


def test_ctrl_c_while_a_step_trains_ends_every_run(run: SmallRun, held: Held) -> None:
    over = threading.Semaphore(0)

    class Hanging(Twice):
        def forward(self, english: str) -> dspy.Prediction:
            try:
                return super().forward(english)
            except BaseException as error:
                if "this rollout is over" in str(error):
                    over.release()
                raise

    hung = threading.Semaphore(0)

    def answer(asked: Asked) -> Any:
        if of_training(asked) and ticket_of(asked.tag("rollout") or "")[0] > 0:
            hung.release()
            held.hold()
        return plain(asked)

    def before_wait(number: int) -> None:
        for _ in range(E * K):
            assert hung.acquire(timeout=PATIENCE)
        ctrl_c()
        held.hold()

    run.answer, run.before_wait = answer, before_wait
    with pytest.raises(KeyboardInterrupt):
        train(run, Hanging(), staleness=1, valset=0)
    asked = len(run.asked)
    held.set()
    for _ in range(E * K):
        assert over.acquire(timeout=PATIENCE), "a program that goes on asks in vain"
    assert len(run.asked) == asked


def test_a_metric_that_fails_ends_the_training_while_a_step_trains(run: SmallRun, held: Held) -> None:
    def broken(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        if run.requests:
            raise ValueError("the judge is broken")
        return float(len(prediction.french))

    def answer(asked: Asked) -> Any:
        if of_training(asked) and ticket_of(asked.tag("rollout") or "")[0] > 0:
            training.wait(PATIENCE)
        return plain(asked)

    training = threading.Event()

    def before_wait(number: int) -> None:
        training.set()
        held.hold()

    run.answer, run.before_wait = answer, before_wait
    with pytest.raises(TrainingFailed, match="gave no score 16 times"):
        train(run, metric=broken, staleness=2, valset=0)
    assert not held.in_vain


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


# ----------------------------------------------------------------- validations beside training


def holding(held: Held) -> Any:
    """What is scored of version 2 is held."""

    def answer(asked: Asked) -> Any:
        if not of_training(asked) and asked.body["model"].startswith("policy@v2"):
            held.hold()
        return plain(asked)

    return answer


def validated(grpo: GRPO) -> list[tuple[int, int]]:
    return [(it["step"], it["version"]) for it in grpo.history if it["kind"] == "validation"]


def test_a_validation_beside_training_scores_its_own_version_by_name(run: SmallRun, held: Held) -> None:
    def before_wait(number: int) -> None:
        if number == 3:  # the one after step 2 is held until another step was sent
            held.set()

    run.answer, run.before_wait = holding(held), before_wait
    grpo = train(run, staleness=1, num_train_steps=6)
    assert not held.in_vain
    asked = Counter((it.body["model"], it.version) for it in run.asked if not of_training(it))
    names = {version: run.name_of(version) for version in (2, 4)}
    # Before the first step and after the last nothing else is to be done.
    assert asked == {("policy", 0): 3, (names[2], 2): 3, (names[4], 4): 3, ("policy", 6): 3}
    assert validated(grpo) == [(0, 0), (2, 2), (4, 4), (6, 6)]
    states = [request.client_state or {} for _, request in sorted(run.requests.items())]
    assert states[2]["validating"] == {"step": 2, "version": 2, "weights": run.weights[2]}
    assert "validating" not in states[-1]


def test_a_validation_is_no_more_steps_behind_than_the_rollouts_are_ahead(run: SmallRun) -> None:
    """Of what is scored later the weights may be gone."""
    sent: set[int] = set()

    def answer(asked: Asked) -> Any:
        if not of_training(asked) and asked.body["model"].startswith("policy@v2"):
            for _ in range(PATIENCE * 100):
                if len(run.requests) > 2:
                    break
                _moment.wait(0.01)
            _moment.wait(0.5)  # in which another could be sent
            sent.add(len(run.requests))
        return plain(asked)

    run.answer = answer
    train(run, staleness=1, num_train_steps=6)
    assert sent == {3}


def test_g21_a_validation_whose_version_went_with_the_machine_is_a_rewind(run: SmallRun) -> None:
    losing, lost = threading.Event(), list[str]()

    def answer(asked: Asked) -> Any:
        is_of_lost = not of_training(asked) and asked.body["model"].startswith("policy@v2")
        if is_of_lost and not losing.is_set():
            for _ in range(PATIENCE * 100):  # until the step is done beside which it is made
                if told.is_set():
                    break
                _moment.wait(0.01)
            _moment.wait(0.2)  # in which nothing but this validation is waited for
            with run.lock:
                if not losing.is_set():
                    losing.set()
                    lost.append(run.name_of(2))
                    run.lose_machine(1)
        if asked.body["model"] in lost:
            return 404, {"error": {"message": "not here", "type": "t", "param": None, "code": "gone"}}
        return plain(asked)

    told = threading.Event()
    run.answer, run.before_wait = answer, lambda number: told.set() if number == 3 else None
    grpo = train(run, staleness=1, num_train_steps=6)
    assert losing.is_set() and grpo.report.rewinds == 1
    assert [len(it) for it in trained(run)] == [E] * 6
    assert [it["step"] for it in grpo.history if it["kind"] == "validation"] == [0, 2, 4, 6]


def test_a_validation_beside_rollouts_does_not_look_into_a_program_that_these_write_into(
    run: SmallRun,
) -> None:
    """What walks through it while a dict in it grows is stopped by Python, and with it the training."""
    walked: list[threading.Thread] = []

    class Remembering(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write = dspy.Predict("english -> french")

        def named_parameters(self) -> Any:
            walked.append(threading.current_thread())
            return super().named_parameters()

        def forward(self, english: str) -> dspy.Prediction:
            return self.write(english=english)

    run.answer = plain
    grpo = train(run, Remembering(), staleness=1, num_train_steps=4)
    assert validated(grpo) == [(0, 0), (2, 2), (4, 4)]
    assert set(walked) == {threading.main_thread()}


def test_what_a_validation_asks_from_threads_of_its_own_is_not_counted_as_untrained(run: SmallRun) -> None:
    class Threaded(Twice):
        def forward(self, english: str) -> dspy.Prediction:
            thread = threading.Thread(target=lambda: self.judge(french=english))
            thread.start()
            thread.join()
            return super().forward(english)

    checked = answering(check="a")
    run.answer = lambda asked: plain(asked) if asked.tag("rollout") else checked(asked)
    grpo = train(run, Threaded(), num_train_steps=2)
    assert len(validated(grpo)) == 2
    assert grpo.report.calls_outside_rollouts == 2 * E * K


@pytest.mark.parametrize("is_kept", [True, False])
def test_c43_a_validation_that_was_under_way_is_made_again_on_the_same_weights_or_not_at_all(
    run: SmallRun,
    monkeypatch: pytest.MonkeyPatch,
    held: Held,
    capsys: pytest.CaptureFixture[str],
    is_kept: bool,
) -> None:
    dead = threading.Event()

    def before_wait(number: int) -> None:
        if number == 3 and not dead.is_set():
            ctrl_c()
            dead.wait(PATIENCE)

    run.answer, run.before_wait = holding(held), before_wait
    begin_life(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(run, staleness=2)
    dead.set()
    held.set()
    assert len(run.requests) == 3
    if not is_kept:
        run.weights[2] = "0" * 64
    begin_life(monkeypatch, after_step=3)
    grpo = train(run, staleness=2)
    assert not held.in_vain
    assert validated(grpo) == [(2, 2), (4, 4), (5, 5)][not is_kept :]
    said = capsys.readouterr().err
    assert ("no validation after 2 steps: its weights are not kept any more" in said) is not is_kept
