"""However a run ends, nothing of ours is left. Killed alone in mid-step, `launch` is in `test_resume.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from launcher.base.home import Home
from launcher.teardown import leftovers
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import SOONEST_SECONDS, wait_until

pytestmark = pytest.mark.slow

# A program that trains and never ends by itself.
PROGRAM = [sys.executable, "-m", "tests.programs.e2e.train_without_end"]


def _launch(home: Path, lease: str = "30m") -> Launched:
    """A lease longer than any wait here: it must not be what ended what a test sees ended."""
    return Launched(home, ["--port", str(free_port()), "--lease", lease, "--", *PROGRAM])


def _reach_a_step(launched: Launched) -> None:
    """Wait until a step's batch is on disk and its checkpoint is not: the trainer is at work."""

    def in_a_step() -> bool:
        assert launched.process.poll() is None, launched.stdout + launched.stderr
        if not launched.begun:
            return False
        machine = launched.run_dir / "machine"
        steps = {path.name for path in machine.glob("steps/0*")}
        committed = {path.name.removeprefix("step-") for path in machine.glob("checkpoints/step-*")}
        return len(committed) >= 1 and bool(steps - committed)

    wait_until(in_a_step, 900, "a step in the trainer", rarest_seconds=SOONEST_SECONDS)


def _nothing_left(launched: Launched, seconds: float) -> None:
    wait_until(lambda: not processes_of(launched.run_id), seconds, f"no process left of {launched.run_id}")


# In every run: Ctrl-C on the runs that tests share (conftest.py), and in mid-work in tests/unit/test_run.py.
@pytest.mark.long
def test_ctrl_c_in_mid_run_ends_cleanly_with_130_and_brings_the_results_home(home: Path) -> None:
    launched = _launch(home)
    try:
        _reach_a_step(launched)
        launched.interrupt()
        assert launched.wait(900) == 130
        assert "down: verified" in launched.stderr
        _nothing_left(launched, 180)
        assert (launched.run_dir / "results" / "adapter" / "adapter_model.safetensors").exists()
    finally:
        launched.kill_tree()


def test_kill_9_of_launch_and_guardian_together_leaves_nothing_once_the_lease_is_over(home: Path) -> None:
    launched = _launch(home, "20s")
    try:
        _reach_a_step(launched)
        guardians = [
            process for process in psutil.process_iter() if _is_guardian_of(process, launched.run_id)
        ]
        assert guardians
        for pid in [launched.process.pid, *(process.pid for process in guardians)]:
            os.kill(pid, signal.SIGKILL)
        _nothing_left(launched, 20 + 180)
    finally:
        launched.kill_tree()


def _is_guardian_of(process: psutil.Process, run_id: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "launcher.teardown.guardian" in command and any(run_id in word for word in command)


def test_g08_gc_ends_a_real_runtime_whose_ledger_is_gone(home: Path) -> None:
    """Launch and guardian are killed, the record is deleted, the lease is long: only gc is left to end it."""
    launched = Launched(home, ["--port", str(free_port()), "--lease", "1h"])
    try:
        launched.wait_for_text("ready: http", 900)
        run_id = launched.run_id
        guardian = json.loads((launched.run_dir / "record.json").read_text())["guardian"]["pid"]
        for pid in (guardian, launched.process.pid):
            os.kill(pid, signal.SIGKILL)
        (launched.run_dir / "record.json").unlink()
        left = {process.pid for process in processes_of(run_id)}
        assert len(left) >= 4

        # Not `gc --yes`: what else is left on this computer is none of a test's business.
        finds = leftovers.find_leftovers(
            Home.find({"LAUNCH_HOME": str(home)}), None, False, leftovers.IDLE_SECONDS
        )
        (ours,) = [find for find in finds if find.run_id == run_id]
        assert (ours.kind, set(ours.pids)) == ("processes", left)
        assert ours.remove() == "ended"
        assert processes_of(run_id) == []
    finally:
        launched.kill_tree()
