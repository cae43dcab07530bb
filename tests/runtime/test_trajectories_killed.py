"""A program that is killed between `gather` and `train`, and begun again: each of its steps once (B13)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.shared.processes import preexec
from tests.runtime.queue_run import QueueRun
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.small_run import TOKEN, Asked
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

STEPS = 3
AHEAD = "train_ahead.py"


class Life:
    """One life of the program, with what it has said."""

    def __init__(self, run: QueueRun, *waits_at: str, program: str = "train_trajectories.py") -> None:
        environ = {**os.environ, "LAUNCH_BASE_URL": run.base_url, "LAUNCH_API_KEY": TOKEN}
        self.process = subprocess.Popen(
            [sys.executable, PROGRAMS / "runtime" / program, *waits_at],
            env=environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=preexec(signal.SIGKILL),
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said += (line.strip() for line in iter(self.process.stdout.readline, ""))

    def until(self, word: str) -> None:
        wait_until(lambda: word in self.said or self.process.poll() is not None, 60, f"{word} of {self.said}")
        assert word in self.said

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._reader.join(60)

    def end(self) -> None:
        assert self.process.wait(60) == 0
        self._reader.join(60)
        assert self.said[-1] == "done"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[QueueRun]:
    run = QueueRun(state=tmp_path)
    run.answer = lambda asked: f"answer {len(run.asked)}"
    try:
        yield run
    finally:
        run.close()


def each_step_once(run: QueueRun) -> None:
    """Every step of the program is committed once, and every answer is trained in one of them at most."""
    kept = [run.checkpoint_store.load(name).state for name in run.checkpoint_store.names()]
    assert [it["client_state"] for it in kept] == [{"steps": number + 1} for number in range(STEPS)]
    assert [it["counts"]["trained"] for it in kept] == [2] * STEPS
    trained = Counter(sample for samples in run.trained().values() for sample in samples)
    assert set(trained.values()) == {1}
    assert trained.total() == 2 * STEPS


@pytest.mark.parametrize(
    ("killed_at", "gathered_again"),
    [("gathered 0", True), ("gathered 1", True), ("trained 1: 2", False)],
)
def test_b13_killed_before_or_after_a_step_is_sent(
    run: QueueRun, killed_at: str, gathered_again: bool
) -> None:
    first = Life(run, killed_at)
    first.until(killed_at)
    first.kill()
    second = Life(run)
    second.end()
    assert (f"gathered {killed_at.split()[1].strip(':')}" in second.said) == gathered_again
    each_step_once(run)


@pytest.mark.parametrize("place", ["before", "after"])
def test_b13_killed_while_a_step_is_being_sent(run: QueueRun, place: str) -> None:
    """The gateway has the request, and takes the step in though its program is gone."""
    first = Life(run, "gathered 1")
    first.until("gathered 1")
    gate = threading.Event()
    setattr(run, f"{place}_step", gate)
    first.go_on()
    wait_until(lambda: run.reached == [place], 60, "the step is sent")
    first.kill()
    gate.set()
    wait_until(lambda: run.queue.list()[-1].id == 2, 60, "the step is taken in")
    second = Life(run)
    second.end()
    assert "gathered 1" not in second.said and "gathered 2" in second.said
    each_step_once(run)


def test_b13_killed_while_a_step_is_being_sent_and_begun_again_before_it_is_taken_in(run: QueueRun) -> None:
    first = Life(run, "gathered 1")
    first.until("gathered 1")
    run.before_step = gate = threading.Event()
    first.go_on()
    wait_until(lambda: run.reached == ["before"], 60, "the step is sent")
    first.kill()
    second = Life(run, "gathered 1")
    second.until("gathered 1")  # of the same place, as nothing is taken in
    gate.set()
    wait_until(lambda: run.queue.list()[-1].id == 2, 60, "the step is taken in")
    second.go_on()
    second.end()
    assert "trained 1: 0" in second.said
    each_step_once(run)


def test_b13_killed_while_its_step_is_trained_it_begins_again_after_that_step(run: QueueRun) -> None:
    first = Life(run, "gathered 1")
    first.until("gathered 1")
    run.held.set()
    first.go_on()
    wait_until(lambda: 2 in run.trained(), 60, "the trainer has the step")
    first.kill()
    asked, looked = len(run.asked), len(run.posted)
    second = Life(run)
    wait_until(lambda: _looks(run, since=looked) >= 3, 60, "it asks again and again for its place")
    assert len(run.asked) == asked, "nothing is rolled out from a place that is not known yet"
    run.held.clear()
    second.end()
    assert "gathered 1" not in second.said
    each_step_once(run)


@pytest.mark.parametrize("killed_at", ["trained 1", "gathered 2", "trained 2"])
def test_b13_killed_while_it_rolls_out_ahead_it_begins_again_what_was_in_no_step(
    run: QueueRun, killed_at: str
) -> None:
    """In the first life the first group never comes, and others may have begun that are in no step."""
    comes = threading.Event()

    def answer(asked: Asked) -> str:
        is_late = asked.body["messages"][0]["content"] == "group 0"
        assert not is_late or comes.wait(60)
        return f"answer {len(run.asked)}"

    run.answer = answer
    first = Life(run, killed_at, program=AHEAD)
    wait_until(lambda: bool(first.said) and first.said[-1].startswith(killed_at), 60, killed_at)
    first.kill()
    comes.set()
    second = Life(run, program=AHEAD)
    second.end()
    done = run.queue.client_state
    assert done is not None and done["place"] == {"steps": STEPS, "next": 2 * STEPS, "again": []}
    sent = [it for it in first.said if it.startswith("gathered")][: 1 if killed_at == "gathered 2" else None]
    numbers = [json.loads(it.partition(": ")[2]) for it in [*sent, *second.said] if it.startswith("gathered")]
    assert sorted(it for of_a_step in numbers for it in of_a_step) == [*range(2 * STEPS)]
    assert all(0 not in json.loads(it.partition(": ")[2]) for it in sent) and len(numbers) == STEPS
    trained = Counter(sample for samples in run.trained().values() for sample in samples)
    assert set(trained.values()) == {1} and trained.total() == 4 * STEPS


def _looks(run: QueueRun, since: int) -> int:
    """How often the run's status was asked for."""
    return [path for path, _ in run.posted[since:]].count("/slipway/status")
