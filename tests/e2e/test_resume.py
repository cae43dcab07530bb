"""A real training killed in its middle and taken up again: the same steps, nothing trained twice.

Three lives of one run: killed in mid-step; taken up where the machine is still here, to its end; taken
up on a machine that was lost, where what it knew of rollouts is answered with the way back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import make_home
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import SOONEST_SECONDS, wait_until

pytestmark = pytest.mark.slow

STEPS = 5
# Of the tiny model in the quickstart, before any training; as a run that nobody interrupts prints it.
BASE_SCORE = 0.21


class Lives:
    """One run of the quickstart, and what is on disk of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lives: list[Launched] = []

    def launch(self, *words: str) -> Launched:
        self.lives.append(Launched(self.home, ["--port", str(free_port()), *words]))
        return self.lives[-1]

    @property
    def folder(self) -> Path:
        return self.lives[-1].run_dir

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "record.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.results / name).read_text().splitlines()]

    def batches(self, machine: Path) -> dict[int, dict[str, Any]]:
        """What each step was handed to train."""
        found = sorted((machine / "steps").glob("[0-9]*/batch.json"))
        return {int(path.parent.name): json.loads(path.read_text()) for path in found}

    def in_mid_step(self, after: int) -> bool:
        """Whether a step after so many committed ones is with the trainer."""
        life = self.lives[-1]
        assert life.process.poll() is None, life.stdout + life.stderr
        if not life.begun:
            return False
        committed = {path.name for path in (self.folder / "machine" / "checkpoints").glob("step-*")}
        given = {f"step-{number:06d}" for number in self.batches(self.folder / "machine")}
        return f"step-{after:06d}" in committed and bool(given - committed)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(make_home(tmp_path_factory.mktemp("resume") / "home"))
    try:
        yield lives
    finally:
        for life in lives.lives:
            life.kill_tree()


def test_g21_live_a_killed_training_ends_with_the_same_steps_and_best_and_trains_nothing_twice(
    lives: Lives,
) -> None:
    quickstart = [sys.executable, "examples/quickstart.py", "--steps", str(STEPS), "--seed", "1"]
    first = lives.launch("--name", "dev", "--", *quickstart)
    wait_until(
        lambda: lives.in_mid_step(after=2), 900, "a step in the trainer", rarest_seconds=SOONEST_SECONDS
    )
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(first.run_id), what="nothing is left")
    wait_until(lambda: lives.record["ended"], 300, "the guardian's own record")
    assert (lives.record["ended_by"], lives.record["state"]) == ("guardian", "verified")

    again = lives.launch("--resume", "dev")
    assert again.wait(1200) == 0, again.stdout + again.stderr
    assert "resuming after step" in again.stderr
    assert f"of {STEPS} steps" in again.stderr.partition("grpo: resuming after")[2]

    trained = [line["step"] for line in lives.lines("metrics.jsonl")]
    batches = lives.batches(lives.folder / "machine")
    rolled_out = [number for number, batch in batches.items() if batch["kind"] == "train"]
    assert rolled_out == list(range(1, STEPS + 1))
    assert trained == list(range(1, len(batches) + 1)), "each step once, and perhaps the best served again"
    samples = [sample["id"] for batch in batches.values() for sample in batch.get("samples", [])]
    assert len(samples) == len(set(samples)) > 0

    figures = json.loads((lives.results / "summary.json").read_text())
    assert figures["before"]["version"] == 0, "N1: the base, not the policy that this life began with"
    assert figures["before"]["score"] == pytest.approx(BASE_SCORE, abs=0.03)
    summary = figures["training"]
    validated = [line for line in lives.lines("grpo.jsonl") if line["kind"] == "validation"]
    assert [line["step"] for line in validated] == [0, STEPS]
    assert summary["steps"] == STEPS
    assert summary["best"] == max(line["score"] for line in validated)
    assert (summary["before"], summary["after"]) == (validated[0]["score"], validated[-1]["score"])
    best = max(validated, key=lambda line: (line["score"], -line["step"]))
    pins = json.loads((lives.folder / "machine" / "checkpoints" / "pinned.json").read_text())
    assert best["checkpoint"] in pins
    assert summary["restored"] in (None, best["checkpoint"])


def test_what_is_durable_then_is_all_that_a_resume_needs(lives: Lives) -> None:
    said = subprocess.run(
        [*lives.lives[-1].executable, "--json", "status", "dev"],
        env={**os.environ, "LAUNCH_HOME": str(lives.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    described = json.loads(said.stdout)["run"]
    newest = max((lives.folder / "machine" / "checkpoints").glob("step-*"))
    assert described["committed_step"] == described["durable_step"] == int(newest.name[5:])
    for path in newest.rglob("*"):
        if path.is_file():
            home = lives.results / "durable" / newest.name / path.relative_to(newest)
            assert home.read_bytes() == path.read_bytes()


# In every run: test_killed.py's lost machine, and the way back on the wire of a real gateway, in
# tests/runtime/test_crash_gateway.py.
@pytest.mark.long
def test_g21_live_on_a_lost_machine_old_rollouts_are_answered_with_the_way_back(lives: Lives) -> None:
    machine = lives.folder / "machine"
    batches = lives.batches(machine)
    old = [member["rollout"] for member in batches[STEPS]["members"]][:4]
    newest = max((machine / "checkpoints").glob("step-*"))
    committed, state = int(newest.name[5:]), json.loads((newest / "state.json").read_text())
    shutil.rmtree(machine)

    program = [sys.executable, str(PROGRAMS / "e2e" / "after_a_loss.py")]
    after = lives.launch("--resume", "dev", "--", *program, *old)
    assert after.wait(900) == 0, after.stdout + after.stderr
    assert f"resuming after step {committed}, the last durable one" in after.stderr
    said = json.loads((lives.results / "after.json").read_text())
    assert (said["status"], said["step"]) == (409, committed)
    assert said["client_state"] == state["client_state"]
    assert (said["trained"], said["version"]) == (4, committed + 1)
    assert [line["step"] for line in lives.lines("metrics.jsonl")] == list(range(1, committed + 2))
