"""`launch` killed at each of its named instants: nothing is left, what was committed stays, the run goes on.

One run is taken up again and again and killed each time somewhere else. Launcher, relay, guardian, minder,
keeper and checkpoints are the real ones; the runtime has no engine (`tests/support/small_runtime.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from launcher.base import failpoints
from launcher.base.processes import ProcessId
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LEASE_SECONDS = 60
# Passed by a run whose machine was lost, below; by a rented one, in tests/cloud/test_matrix.py.
ELSEWHERE = {"durable.seeding", *(name for name in failpoints.NAMES if name.startswith("cloud."))}
# The heart's own requests come first: this one is the program's.
COUNTS = {"relay.read": 5, "relay.forwarded": 5, "relay.answered": 5}


@dataclass
class SmallRun:
    """One run named dev, through all its lives."""

    home: Path
    lives: list[Launched] = field(default_factory=list)

    def launch(self, *words: str, **environ: str) -> Launched:
        """One more life. `--resume dev` is the caller's."""
        options = ["--port", str(free_port()), "--lease", f"{LEASE_SECONDS}s"]
        command = [sys.executable, "-m", "tests.support.small_launch"]
        self.lives.append(Launched(self.home, [*options, *words], executable=command, environ=environ))
        return self.lives[-1]

    def launch_verb(self, *words: str) -> Launched:
        return Launched(self.home, list(words))

    def standing(self) -> tuple[int, int, int]:
        """What `launch status` says is committed, durable, and at most between them."""
        status = self.launch_verb("--json", "status", "dev")
        assert status.wait(600) == 0, status.stderr
        described = status.events[0]["run"]
        return tuple(described[key] for key in ("committed_step", "durable_step", "durable_bound_steps"))

    def begin(self, steps: int) -> Launched:
        return self.launch("--name", "dev", "--", *program(steps))

    @property
    def folder(self) -> Path:
        return self.lives[-1].run_dir

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "record.json").read_text())

    @property
    def keys(self) -> list[str]:
        """The keys of the committed steps, in their order; the small runtime keeps them all."""
        states = sorted((self.folder / "machine" / "checkpoints").glob("step-*/state.json"))
        return [json.loads(state.read_text())["key"] for state in states]

    @property
    def words(self) -> list[str]:
        """What the program was answered in all lives, as far as it wrote it down."""
        lines = (self.folder / "results" / "words.jsonl").read_text().splitlines()
        return [word for line in lines for word in json.loads(line)["words"]]

    def wait_for_steps(self, steps: int) -> None:
        """Until so many are committed; ends early when launch does."""
        life = self.lives[-1]
        wait_until(
            lambda: life.process.poll() is not None or (life.begun and len(self.keys) >= steps),
            300,
            f"{steps} steps",
        )
        assert life.process.poll() is None, life.stderr

    def wait_for_nothing(self) -> None:
        """No process, no socket, no open door, within the lease."""
        run_id = self.lives[-1].run_id
        wait_until(
            lambda: not processes_of(run_id), LEASE_SECONDS, lambda: f"{processes_of(run_id)} to be gone"
        )
        wait_until(lambda: not _attended(self.record), LEASE_SECONDS, "the guardian to be done")
        described = self.record["machine"]
        assert not described or not Path(described["socket_dir"]).exists()
        assert not (self.folder / "token").exists()
        if self.record["url"]:
            with socket.socket() as door:
                assert door.connect_ex(("127.0.0.1", urlsplit(self.record["url"]).port or 0)) != 0

    def end(self) -> None:
        for life in self.lives:
            life.kill_tree()


def program(steps: int) -> list[str]:
    return [sys.executable, "-m", "tests.support.small_program", str(steps)]


def _attended(record: dict[str, Any]) -> bool:
    named = [record[name] for name in ("launch", "guardian", "minder")]
    return any(ProcessId(**it).alive() for it in named if it)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path_factory.mktemp("killed"))
    first = run.begin(1)
    try:
        assert first.wait(600) == 0, first.stderr
        yield run
    finally:
        run.end()


@pytest.mark.parametrize("name", [name for name in failpoints.NAMES if name not in ELSEWHERE])
def test_g01_g21_killed_at_this_instant_nothing_is_left_and_the_run_goes_on(run: SmallRun, name: str) -> None:
    before = run.keys
    killed = run.launch("--resume", "dev", LAUNCH_FAILPOINT=f"{name}@{COUNTS.get(name, 1)}:kill9")
    assert killed.wait(600) == -signal.SIGKILL, killed.stderr
    run.wait_for_nothing()

    assert f"resuming after step {len(before)}" in killed.stderr or name == "cli.recorded"
    assert run.keys[: len(before)] == before, "what was committed is kept"
    assert len(run.keys) - len(before) <= 1
    assert len(set(run.keys)) == len(run.keys), "no step is made twice"
    assert run.record["state"] == ("created" if name == "cli.recorded" else "verified")
    assert len(set(run.words)) == len(run.words), "no answer is given to two requests"


def test_g21_after_all_of_that_it_ends_well(run: SmallRun) -> None:
    before = len(run.keys)
    last = run.launch("--resume", "dev")
    assert last.wait(600) == 0, last.stderr
    assert run.keys == [f"step-{number}" for number in range(1, before + 2)]
    assert run.record["ended_by"] == "launch"


@pytest.mark.parametrize(
    ("armed", "code", "ended_by"),
    [
        ("cli.guarded:raise", 1, "launch"),
        ("cli.armed:int", 130, "launch"),
        ("cli.served:term", 143, "launch"),
        ("cli.started:raise", 1, "launch"),
        ("cli.pulled:raise", 1, "guardian"),
        ("cli.downed:segv", -signal.SIGSEGV, "guardian"),
    ],
)
def test_g01_broken_off_in_other_ways_nothing_is_left_either(
    run: SmallRun, armed: str, code: int, ended_by: str
) -> None:
    before = run.keys
    broken = run.launch("--resume", "dev", LAUNCH_FAILPOINT=armed)
    assert broken.wait(600) == code, broken.stderr
    run.wait_for_nothing()
    assert run.keys[: len(before)] == before
    assert (run.record["state"], run.record["ended_by"]) == ("verified", ended_by)


def test_g01_g21_with_its_guardian_killed_as_well_what_is_left_is_ended_first(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    try:
        first = run.begin(0)
        run.wait_for_steps(2)
        for pid in (run.record["guardian"]["pid"], first.process.pid):
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        again = run.launch("--resume", "dev", "--", *program(1))
        assert again.wait(600) == 0, again.stderr
        run.wait_for_nothing()
        assert run.keys == [f"step-{number}" for number in range(1, len(run.keys) + 1)]
        assert len(set(run.words)) == len(run.words)
    finally:
        run.end()


def test_g21_a_lost_machine_is_begun_again_from_the_durable_step(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    try:
        first = run.launch("--name", "dev", "--", *program(3), "hold")
        run.wait_for_steps(3)
        refused = run.launch_verb("--resume", "dev")
        assert refused.wait(600) == 2 and "dev is live" in refused.stderr
        wait_until(lambda: run.standing() == (3, 3, 1), what="what is committed is durable while it lives")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        run.wait_for_nothing()
        committed = run.keys
        (run.folder / "machine").rename(tmp_path / "lost")
        killed = run.launch("--resume", "dev", LAUNCH_FAILPOINT="durable.seeding:kill9")
        assert killed.wait(600) == -signal.SIGKILL
        run.wait_for_nothing()
        again = run.launch("--resume", "dev", "--json", "--", *program(2))
        assert again.wait(600) == 0, again.stderr
        begun = again.events[0]
        assert (begun["rewound"], begun["resumed_after"]) == (True, len(committed)) == (True, 3)
        durable = begun["resumed_after"]
        assert run.keys == [f"step-{number}" for number in range(durable, durable + 3)]
        said = json.loads((run.folder / "machine" / "rewound.json").read_text())
        assert (said["to_step"], said["client_state"]) == (durable, {"done": durable})
        steps = [json.loads(line)["step"] for line in (run.folder / "results" / "metrics.jsonl").open()]
        assert steps == list(range(1, durable + 3)), "the history of what went before is not lost"
    finally:
        run.end()


@pytest.mark.parametrize("frozen", ["gateway", "launch"])
def test_g05_frozen_for_less_than_the_lease_it_loses_nothing(tmp_path: Path, frozen: str) -> None:
    run = SmallRun(tmp_path)
    try:
        launched = run.begin(0)
        run.wait_for_steps(2)
        process = launched.process_handle()
        if frozen == "gateway":
            (process,) = [it for it in processes_of(launched.run_id) if "gateway" in it.cmdline()]
        process.suspend()
        wait_until(lambda: _stands_still(run), LEASE_SECONDS / 2, "no step is made")
        if frozen == "gateway":
            wait_until(lambda: "no answer for" in launched.stderr, LEASE_SECONDS / 2, "the silence is said")
        before = len(run.keys)
        process.resume()
        wait_until(lambda: len(run.keys) > before + 2, what="it goes on")
        said = launched.stderr
        launched.interrupt()
        assert launched.wait(600) == 130
        assert run.keys == [f"step-{number}" for number in range(1, len(run.keys) + 1)]
        assert len(set(run.words)) == len(run.words)
        assert "Error" not in said and "Traceback" not in said
    finally:
        run.end()


def _stands_still(run: SmallRun) -> bool:
    before = len(run.keys)
    time.sleep(0.7)  # a step takes a tenth of it
    return len(run.keys) == before


def test_g22_results_that_cannot_come_home_stay_where_they_are_with_exit_8(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    program = str(PROGRAMS / "e2e" / "in_the_way.py")
    try:
        launched = run.launch("--name", "dev", "--", sys.executable, program)
        assert launched.wait(600) == 8, launched.stderr
        assert f"they are still in {run.folder / 'machine'}" in launched.stderr
        assert "down: verified" in launched.stderr
        assert (run.folder / "machine" / "logs" / "keeper.log").exists()
        (run.folder / "results" / "logs").unlink()
        assert run.launch_verb("pull", "dev").wait(600) == 0
        assert (run.folder / "results" / "logs" / "keeper.log").exists()
    finally:
        run.end()
