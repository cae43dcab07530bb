"""Keeper, supervisor and tether with real processes and real signals: whatever is killed, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import tether
from runtime.shared import failpoints, process_table, processes
from tests.runtime.failpoints import arm, instants
from tests.support.environment import PROGRAMS, runtime_environ
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SLEEP = ["sleep", "1000"]
# A child that ignores SIGTERM, with a child of its own in another session: what vLLM's processes are like.
STUBBORN = ["sh", "-c", "trap '' TERM; setsid sleep 1001 & while :; do sleep 1002; done"]

# Renewed for longer than it lasts, and often enough on a computer that is busy.
LEASE_SECONDS = 5.0
RENEW_EVERY_SECONDS = 0.5
RENEWALS = 12


class Family:
    """A keeper over a supervisor over `children`; every process of it carries a mark in its environment."""

    def __init__(
        self, folder: Path, children: dict[str, list[str]], failpoint: str = "", **settings: Any
    ) -> None:
        self.state = folder
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "lease").touch()
        (folder / "supervisor.json").unlink(missing_ok=True)  # of the family before it
        config = {
            "state_dir": str(folder), "children": children, "deadline_seconds": None, "grace_seconds": 5.0,
            "stop_seconds": 0.5, "restarts": 2,
            # Longer than any wait here: it must never be the lease that ended what a test sees ended.
            "lease_seconds": 600.0, **settings,
        }  # fmt: skip
        (folder / "runtime.json").write_text(json.dumps(config))
        self.mark = f"FAMILY={uuid.uuid4()}"
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.family", "keeper", "--config", folder / "runtime.json"],
            stdin=subprocess.PIPE,
            env={**os.environ, "FAMILY": self.mark.partition("=")[2], failpoints.VARIABLE: failpoint},
        )
        assert self.keeper.stdin
        self.keeper.stdin.write(b"the-token\n")
        self.keeper.stdin.close()

    def alive(self) -> list[int]:
        found = []
        for process in process_table.table():
            try:
                marked = self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marked and process.state != "Z":
                found.append(process.pid)
        return found

    def said(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.state / f"{name}.json").read_text())
        except FileNotFoundError:
            return {}

    def child(self, name: str) -> dict[str, Any]:
        return next((c for c in self.said("supervisor").get("children", []) if c["name"] == name), {})

    def until_ready(self) -> Family:
        """Its lease is renewed meanwhile: a busy computer takes longer than some of them last."""
        wait_until(self._renewed_and_ready)
        return self

    def _renewed_and_ready(self) -> bool:
        os.utime(self.state / "lease")
        return self.said("supervisor").get("phase") == "ready"

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def gone(self) -> None:
        wait_until(lambda: not self.alive())
        self.keeper.wait(120)

    @property
    def supervisor_pid(self) -> int:
        return self.said("keeper")["supervisor_pid"]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    started: list[Family] = []

    def start(**settings: Any) -> Family:
        children = settings.pop("children", {"calm": SLEEP, "stubborn": STUBBORN})
        started.append(Family(tmp_path, children, **settings))
        return started[-1]

    yield start
    for one in started:
        for pid in one.alive():
            processes.signal_process(pid, signal.SIGKILL)
        one.keeper.wait(120)


def test_a_signal_to_the_keeper_ends_everything_in_order(family) -> None:
    it = family().until_ready()
    wait_until(lambda: len(it.alive()) >= 7)  # keeper, supervisor, two tethers, sleep, sh and its two sleeps
    it.keeper.terminate()
    assert it.keeper.wait(120) == 0
    assert not it.alive()
    assert it.said("keeper")["state"] == "ended" and it.said("keeper")["reason"] == "signal"
    assert it.said("supervisor")["phase"] == "stopping"
    assert {child["state"] for child in it.said("supervisor")["children"]} == {"stopped"}


def test_a_lease_nobody_renews_ends_everything(family) -> None:
    it = family(lease_seconds=LEASE_SECONDS).until_ready()
    for _ in range(RENEWALS):
        time.sleep(RENEW_EVERY_SECONDS)
        os.utime(it.state / "lease")
    assert it.keeper.poll() is None
    it.gone()
    assert it.said("keeper")["reason"] == "lease"
    assert it.keeper.returncode == 0


def test_a_lease_stamped_by_a_wrong_clock_is_a_renewal_all_the_same(family) -> None:
    it = family(lease_seconds=LEASE_SECONDS).until_ready()
    for tick in range(RENEWALS):
        time.sleep(RENEW_EVERY_SECONDS)
        os.utime(it.state / "lease", (tick, tick))
    assert it.keeper.poll() is None


def test_the_deadline_ends_everything_however_fresh_the_lease_is(family) -> None:
    it = family(deadline_seconds=1.5)
    it.gone()
    assert it.said("keeper")["reason"] == "deadline"


def test_a_keeper_killed_by_force_takes_everything_with_it(family) -> None:
    it = family().until_ready()
    it.kill(it.keeper.pid)
    it.gone()


def test_a_supervisor_killed_by_force_leaves_nothing(family) -> None:
    it = family().until_ready()
    it.kill(it.supervisor_pid)
    it.gone()
    assert it.said("keeper")["reason"] == "supervisor exited"
    assert it.keeper.returncode == 1


def test_keeper_and_supervisor_killed_together_leave_nothing(family) -> None:
    it = family().until_ready()
    it.kill(it.supervisor_pid, it.keeper.pid)
    it.gone()


# What brings a supervisor there: a child's death, or its own end; the others it passes on its way up.
REACHED_BY = {
    "supervisor.noticed": "death",
    "supervisor.restarting": "death",
    "supervisor.stopping": "end",
    "supervisor.stopped": "end",
}


@pytest.mark.parametrize("instant", sorted(instants("supervisor")))
def test_a_supervisor_killed_at_a_named_instant_leaves_nothing_and_the_next_one_starts(
    family, instant: str, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    reached_by = REACHED_BY.get(instant)
    if reached_by is None:
        arm(armed, f"{instant}@2:kill9")
    it = family(failpoint=f"file:{armed}")
    if reached_by is not None:
        it.until_ready()
        arm(armed, f"{instant}:kill9")
        it.kill(it.child("calm")["pid"]) if reached_by == "death" else it.keeper.terminate()
    it.gone()
    assert not armed.exists(), f"{instant} was not passed"
    assert it.said("keeper")["state"] == "ended" and it.said("keeper")["left"] == []
    assert it.said("keeper")["reason"] == ("signal" if reached_by == "end" else "supervisor exited")
    again = family().until_ready()
    assert {child["state"] for child in again.said("supervisor")["children"]} == {"ready"}


def test_a_frozen_supervisor_is_ended_when_the_grace_is_over(family) -> None:
    it = family(grace_seconds=1.0).until_ready()
    os.kill(it.supervisor_pid, signal.SIGSTOP)
    it.keeper.terminate()
    it.gone()


def test_a_tether_killed_by_force_leaves_no_orphan_and_its_child_is_started_again(family) -> None:
    it = family().until_ready()
    first = it.child("stubborn")["pid"]
    # It is ready once it is there; its two sleeps come a moment later.
    wait_until(lambda: len(process_table.descendants(first)) >= 2)
    below = [first, *process_table.descendants(first)]
    held_by = next(process.parent for process in process_table.table() if process.pid == first)
    it.kill(held_by)
    wait_until(lambda: it.child("stubborn").get("state") == "ready" and it.child("stubborn")["pid"] != first)
    wait_until(lambda: not set(below) & set(it.alive()))
    assert it.child("calm")["restarts"] == 0


def test_a_dead_child_is_started_again_and_its_descendants_are_ended(family) -> None:
    it = family().until_ready()
    first = it.child("stubborn")["pid"]
    below = process_table.descendants(first)
    it.kill(first)
    wait_until(
        lambda: it.child("stubborn").get("restarts") == 1 and it.said("supervisor")["phase"] == "ready"
    )
    assert not set(below) & set(it.alive())


def test_a_child_that_keeps_failing_is_given_up_with_its_last_words(family) -> None:
    dying = ["sh", "-c", "echo no such model >&2; exit 3"]
    it = family(children={"calm": SLEEP, "dying": dying})
    wait_until(lambda: it.child("dying").get("state") == "failed")
    state = it.said("supervisor")
    assert state["phase"] == "failed"
    assert "no such model" in state["detail"] and "exit code 3" in state["detail"]
    assert it.child("dying")["restarts"] == 2
    # The others go on: the gateway has to say what happened.
    wait_until(lambda: it.child("calm")["state"] == "ready")


def test_n05_of_an_engine_that_keeps_failing_its_cores_first_error_is_told(family) -> None:
    said = "(EngineCore pid=7) ERROR 11-27 03:07:13 [core.py:1] RuntimeError: head_dim=16"
    noise = "; ".join(["echo '(MainProcess pid=1) INFO [shutdown] MPClient: complete'"] * 20)
    dying = ["sh", "-c", f"echo '{said}'; {noise}; exit 3"]
    it = family(children={"calm": SLEEP, "dying": dying})
    wait_until(lambda: it.child("dying").get("state") == "failed")
    assert it.child("dying")["detail"].endswith("RuntimeError: head_dim=16")


def test_the_runtime_ends_when_its_gateway_cannot_be_kept_up(family) -> None:
    it = family(children={"calm": SLEEP, "vital": ["false"]})
    it.gone()
    assert it.said("keeper")["reason"] == "supervisor exited"


def test_the_token_reaches_a_child_over_its_standard_input_and_nothing_else(family) -> None:
    it = family(children={"reader": ["sh", "-c", "read line; echo got $line; exec sleep 1000"]}).until_ready()
    wait_until(lambda: "got the-token" in (it.state / "logs" / "reader.log").read_text())
    for pid in it.alive():
        for kind in ("cmdline", "environ"):
            assert b"the-token" not in Path(f"/proc/{pid}/{kind}").read_bytes()
    for path in it.state.glob("*.json"):
        assert "the-token" not in path.read_text()


def test_without_a_token_the_keeper_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "runtime.json").write_text(json.dumps({"state_dir": str(tmp_path), "lease_seconds": 5}))
    done = subprocess.run(
        [sys.executable, "-m", "runtime.keeper", "--config", tmp_path / "runtime.json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "no token" in done.stderr
    assert not (tmp_path / "keeper.json").exists()


def test_the_keeper_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    program = PROGRAMS / "runtime" / "what_keeper_loads.py"
    done = subprocess.run(
        [sys.executable, program, "pydantic", "fastapi", "torch"],
        env=runtime_environ(), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_a_tether_passes_on_how_its_command_ended() -> None:
    for command, code in ((["true"], 0), (["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137)):
        assert subprocess.run(tether.command(command, 1.0), timeout=120).returncode == code
