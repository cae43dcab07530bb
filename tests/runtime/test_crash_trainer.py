"""The trainer and the checkpoint writer, killed: nothing committed is lost, nothing is trained twice.

Every run here is a replay of recorded batches, so at its end the adapter must be that of a run nobody
touched, bit for bit. The trainer is the real recipe on a model of two layers (trainers.py).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.shared.batch import Batch, empty_batch, step_folder, write_batch
from runtime.shared.checkpoint import CheckpointStore, checkpoint_name
from runtime.trainer.crash_counter import MAX_CRASHES
from runtime.trainer.forward import sequences
from runtime.trainer.packing import Pack, pack
from tests.runtime.failpoints import arm, instants
from tests.runtime.trainers import Run, Trainers, recorded, same_tensors
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 40
KILLS = 10
# Of a life, in seconds: from before its first word to some steps in.
LIFE_SECONDS = 1.2
# Where the long run keeps its folder and its log, so that it can be taken up again; else a temporary one.
LONG_VARIABLE = "SLIPWAY_LONG_DIR"
LONG_KILLS = 100
LONG_STEPS = 1000


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


@pytest.fixture(scope="module")
def straight(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All steps in one life, every checkpoint kept."""
    run = Run(tmp_path_factory.mktemp("straight"), trainers, keep=STEPS)
    run.record(1, STEPS)
    assert run.live() == 0, run.log
    assert run.step == STEPS and run.logged == list(range(1, STEPS + 1))
    return run


@pytest.fixture
def run(trainers: Trainers, tmp_path: Path) -> Run:
    return Run(tmp_path, trainers)


class Lives:
    """Lives of a trainer that are to be killed at any moment, but not each at the same step: that would be
    taken for the step's own doing, and on a busy computer a life may be too short for a single one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = run.step
        self._in_vain = 0

    def start(self) -> int:
        """A life; where another without a step would be one too many, it has done one. Its process."""
        pid, following = self._run.start(follow=True), self._before + 1
        if self._in_vain >= MAX_CRASHES - 1 and step_folder(self._run.folder / "steps", following).exists():
            committed = [checkpoint_name(following)]
            wait_until(lambda: self._run.store.names()[-1:] >= committed, what=lambda: self._run.log)
        return pid

    def ended(self) -> None:
        """It was killed: what was committed is there."""
        step = self._run.step
        assert step >= self._before
        self._in_vain = 0 if step > self._before else self._in_vain + 1
        self._before = step


def assert_ends_like(run: Run, straight: Run) -> None:
    """One more life, undisturbed, to the end of what is recorded."""
    assert run.live() == 0, run.log
    assert same_tensors(run.newest, straight.store.load(run.newest.name))
    assert run.logged == list(range(1, run.step + 1))
    assert not list(run.store.root.glob(".tmp-*")) and not list((run.folder / "steps").glob("*/failed.json"))


def test_g21_killed_at_every_named_instant_a_replay_ends_with_the_same_adapter(
    run: Run, straight: Run
) -> None:
    names = instants("trainer", "checkpoint")
    assert len(names) >= 11
    run.record(1, STEPS)
    assert run.live("trainer.committed@3:kill9") == -9  # so that there is something to remove
    for instant in [*sorted(names), "checkpoint.writing@2", "checkpoint.writing@3", "checkpoint.file@3"]:
        before = run.step
        assert run.live(f"{instant}:kill9") == -9, f"{instant} was not passed: {run.log}"
        assert run.step - before in (0, 1), instant
    assert run.step < STEPS
    assert_ends_like(run, straight)


def test_g20_g21_killed_at_random_instants_the_newest_whole_checkpoint_is_gone_on_from(
    run: Run, straight: Run
) -> None:
    chance, lives = random.Random(20), Lives(run)
    run.record(1, STEPS)
    for _ in range(KILLS):
        pid = lives.start()
        run.kill_after(chance.uniform(0, LIFE_SECONDS), pid)
        lives.ended()
    assert_ends_like(run, straight)


@pytest.mark.long
def test_g20_g21_a_hundred_kills(trainers: Trainers, tmp_path: Path) -> None:
    """One line a kill in kills.jsonl. With SLIPWAY_LONG_DIR, its folder, it goes on where it was left."""
    folder = Path(os.environ.get(LONG_VARIABLE) or tmp_path)
    run, straight = Run(folder / "killed", trainers), Run(folder / "straight", trainers, keep=LONG_STEPS)
    log = folder / "kills.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    lives = Lives(run)
    for number in range(done, LONG_KILLS):
        chance, before = random.Random(number), run.step
        run.record(before + 1, before + 40)
        pid = lives.start()
        # Half of the kills fall on the whole life, half on the moments around a commit.
        if number % 2:
            wait_until(lambda pid=pid: run.said().items() >= {"state": "training", "pid": pid}.items())
        seconds = chance.uniform(0, 0.3 if number % 2 else LIFE_SECONDS)
        assert run.kill_after(seconds, pid) == -9, run.log
        partial = sorted(path.name for path in run.store.root.glob(".tmp-*"))
        line = {
            "kill": number + 1, "time": round(time.time()), "after_seconds": round(seconds, 3),
            "during": run.said().get("state"), "step_before": before, "step_after": run.step,
            "left_partial": partial,
        }  # fmt: skip
        lives.ended()
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
    last = max(int(path.name) for path in (run.folder / "steps").iterdir())
    straight.record(1, last)
    assert straight.live() == 0, straight.log
    assert_ends_like(run, straight)
    assert run.step == last


def test_c43_ten_steps_and_ten_more_are_twenty(run: Run, straight: Run) -> None:
    for last in (10, 20):
        run.record(last - 9, last)
        assert run.live() == 0, run.log
    assert run.step == 20
    assert_ends_like(run, straight)
    assert run.newest.state["counters"]["steps"] == run.newest.version == 20
    assert run.newest.state["client_state"] == {"at": 20} and run.newest.state["batch"] == "000020"


def test_g20_a_full_disk_is_waited_for_and_said(run: Run, straight: Run, tmp_path: Path) -> None:
    run.record(1, 3)
    file = tmp_path / "armed"
    pid = run.start(failpoint=arm(file, "checkpoint.file@4:full"))
    said = wait_until(lambda: run.said() if run.said().get("error") else {})
    assert "not committed yet" in said["error"] and "No space left" in said["error"]
    assert not file.exists() and said["step"] <= 1
    assert run.trainers.wait(pid) == 0
    assert run.step == 3
    assert_ends_like(run, straight)


@pytest.mark.parametrize("instant", ["trainer.read", "trainer.backward", "trainer.stepped"])
def test_a_step_that_fails_costs_itself_and_where_the_policy_was_touched_a_restart(
    run: Run, instant: str
) -> None:
    run.record(1, 3)
    sound = instant == "trainer.read"
    assert run.live(f"{instant}@2:raise") == (0 if sound else 1)
    assert run.live() == 0
    failed = json.loads((step_folder(run.folder / "steps", 2) / "failed.json").read_text())
    assert failed["error"] == f"FailpointError: failpoint {instant}"
    assert run.logged == [1, 3] and run.step == 3
    assert run.said() == run.said() | {"state": "ready", "step": 3, "error": None}
    assert run.newest.state["counters"]["steps"] == 2


@pytest.mark.parametrize("instant", ["trainer.read", "trainer.pack"])
def test_c49_what_failed_left_nothing_behind_in_the_policy(
    run: Run, trainers: Trainers, tmp_path: Path, instant: str
) -> None:
    """A step that failed after some of its gradients were there changes nothing in the next."""
    other = Run(tmp_path / "other", trainers)
    for one in (run, other):
        one.record(1, 3)
    (step_folder(other.folder / "steps", 2) / "failed.json").write_text('{"error": "never tried"}')
    before = 1 if instant == "trainer.read" else len(packs_of(recorded(1), run.config.train.pack_tokens))
    assert run.live(f"{instant}@{before + 1}:raise") == other.live() == 0
    failed = json.loads((step_folder(run.folder / "steps", 2) / "failed.json").read_text())
    assert failed["error"] == f"FailpointError: failpoint {instant}"
    assert same_tensors(run.newest, other.newest)


def packs_of(batch: Batch, budget: int) -> list[Pack]:
    return pack(sequences(batch), range(batch.sequences), budget)


def test_g19_a_step_that_ends_the_trainer_every_time_is_given_up(run: Run) -> None:
    """Killed while it computes, as for memory: it can say nothing, and the next process tries it again."""
    run.record(1, 2)
    for _ in range(MAX_CRASHES):
        assert run.live("trainer.pack:kill9") == -9
    assert run.live() == 0, run.log
    failed = json.loads((step_folder(run.folder / "steps", 1) / "failed.json").read_text())
    assert "ended 3 times" in failed["error"] and "train.pack_tokens" in failed["error"]
    assert run.logged == [2]


def test_g19_kills_after_the_gradients_were_whole_are_no_tries_of_the_step(run: Run, straight: Run) -> None:
    run.record(1, 2)
    for _ in range(MAX_CRASHES + 1):
        assert run.live("trainer.stepped:kill9") == -9
    assert_ends_like(run, straight)


def test_retention_keeps_the_latest_and_the_pinned_and_each_can_be_restored(run: Run, straight: Run) -> None:
    run.record(1, 3)
    assert run.live() == 0
    CheckpointStore(run.folder / "checkpoints").pin("step-000002")
    run.record(4, 6)
    assert run.live() == 0
    # What staleness may ask for is kept beside the two that the run keeps.
    assert run.store.names() == ["step-000002", "step-000004", "step-000005", "step-000006"]
    for step, source in enumerate(("step-000002", "step-000006", "step-000007"), start=7):
        back = {"schema": 1, "kind": "restore", "step": step, "from": source, "key": f"back-{step}"}
        write_batch(step_folder(run.folder / "steps", step), empty_batch(back))
        assert run.live() == 0, run.log
        expected = {"step-000007": "step-000002"}.get(source, source)
        assert run.newest.adapter_sha256 == straight.store.load(expected).adapter_sha256
    assert run.newest.state["kind"] == "restore" and run.newest.state["counters"]["steps"] == 9
    assert run.newest.state["counters"]["updates"] == 6


def test_a_replay_keeps_what_a_later_step_goes_back_to(run: Run, straight: Run) -> None:
    run.record(1, 6)
    back = {"schema": 1, "kind": "restore", "step": 7, "from": "step-000001", "key": "back-7"}
    write_batch(step_folder(run.folder / "steps", 7), empty_batch(back))
    assert run.live() == 0
    assert run.store.names() == ["step-000001", "step-000005", "step-000006", "step-000007"]
    assert run.newest.adapter_sha256 == straight.store.load("step-000001").adapter_sha256
