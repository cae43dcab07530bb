"""A program of trajectories under `launch`, killed and resumed until it is done: each step once (B13)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import make_home
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.long

STEPS = 3
# Where each life of the program ends. Before the first step there is nothing to resume.
DEATHS = ("gathered 1", "training 1", "trained 2: 2")
LAST_WORDS = ("gathered 1", "gathered 1", "trained 2: 2", "done")
JOB_FAILED = 6


def test_b13_live_a_program_killed_in_each_of_its_lives_takes_each_step_once(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    program = [sys.executable, str(PROGRAMS / "runtime" / "train_trajectories.py")]
    lives: list[Launched] = []
    try:
        for words in (["--name", "dev", "--", *program], *[["--resume", "dev"]] * len(DEATHS)):
            environ = {"DEATHS": ",".join(DEATHS)}
            lives.append(Launched(home, ["--port", str(free_port()), *words], environ=environ))
            ended = lives[-1].wait(600)
            is_last = len(lives) > len(DEATHS)
            assert ended == (0 if is_last else JOB_FAILED), lives[-1].stdout + lives[-1].stderr
            assert lives[-1].stdout.splitlines()[-1] == LAST_WORDS[len(lives) - 1]
    finally:
        for life in lives:
            life.kill_tree()
    machine = lives[-1].run_dir / "machine"
    kept = [json.loads(path.read_text()) for path in sorted(machine.glob("checkpoints/step-*/state.json"))]
    assert [it["client_state"] for it in kept] == [{"steps": number + 1} for number in range(STEPS)]
    batches = [json.loads(path.read_text()) for path in sorted(machine.glob("steps/[0-9]*/batch.json"))]
    trained = [sample["id"] for batch in batches for sample in batch["samples"]]
    assert len(trained) == len(set(trained)) == 2 * STEPS
