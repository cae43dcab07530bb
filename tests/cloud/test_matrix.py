"""A rented run killed at each of its instants, in each way: its machine is gone within a minute, with proof.

    pytest -m matrix tests/cloud/test_matrix.py          40 min; goes on where it was broken off
    python -m tests.cloud.matrix_log                     its log as a table

Each case (`matrix.py`) is a whole `launch --gpus` on the test cloud. One that has passed leaves a line in the
log (`SLIPWAY_MATRIX_LOG`, else in the user's cache) and is not run again for the same code. What CI runs of
it is at the end, with what SkyPilot's own minutes make long.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from launcher.results import checkpoints, durable, whole_checkpoints
from tests.cloud.launched import OURS, RENTED, SKYPILOT, Launched, running
from tests.cloud.matrix import (
    ASKING,
    CASES,
    IDLE,
    PROGRAMS,
    TRAINING,
    UP_SECONDS,
    Case,
    begin,
    check,
    outcome,
    small_code,
    strike,
)
from tests.cloud.matrix_log import note, skip_when_seen
from tests.cloud.rig import Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------ the matrix


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_g01_struck_at_this_instant_the_machine_is_gone_within_a_minute(
    case: Case, request: pytest.FixtureRequest
) -> None:
    skip_when_seen(case.name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    launched = begin(rig, case)
    ended = outcome(rig, launched, strike(rig, launched, case))
    check(case, ended)
    note(case.name, ended, begun)


@pytest.mark.matrix
def test_g01_killed_while_a_new_machine_gets_the_durable_steps_it_is_gone_as_well(
    request: pytest.FixtureRequest,
) -> None:
    case = Case("cloud.seeding", "kill9")
    skip_when_seen(case.name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    words = [*RENTED, "--name", "dev", "--", *ASKING, "1"]
    first = Launched(rig, words, PYTHONPATH=small_code(rig))
    assert first.wait(UP_SECONDS) == 0, first.text
    launched = begin(rig, case, "--resume", "dev")
    ended = outcome(rig, launched, strike(rig, launched, case))
    check(case, ended)
    note(case.name, ended, begun)


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["machine made", "cli.started"])
def test_g01_with_skypilots_server_killed_at_the_same_moment_its_guardian_still_ends_it(
    where: str, request: pytest.FixtureRequest
) -> None:
    name = f"{where}:kill9, and all of SkyPilot's processes"
    skip_when_seen(name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    words = [*RENTED, "--lease", "1m", "--idle", "1m", "--", *IDLE]
    launched = Launched(rig, words, PYTHONPATH=small_code(rig))
    if where == "machine made":
        wait_until(lambda: rig.witness("run"), UP_SECONDS, lambda: f"a machine\n{launched.text}")
    else:
        launched.wait_for("ready: http", UP_SECONDS)
        wait_until(lambda: running(rig, IDLE[1]), 120, lambda: f"the program\n{launched.text}")
    launched.send(signal.SIGKILL)
    kill(running(rig, *SKYPILOT))
    ended = outcome(rig, launched, time.time(), 60 + 60 + 90)
    check(Case(where, "kill9"), ended)
    note(name, ended, begun)


@pytest.mark.matrix
def test_g03_a_failed_setup_whose_launch_crashes_at_that_moment_leaves_nothing(
    request: pytest.FixtureRequest,
) -> None:
    # There is no environment on the image, and no way out to make one: setting up fails, and this comes next.
    case = Case("cli.pulled", "segv")
    skip_when_seen(name := f"{case.name}, after a failed setup")
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("rig")
    launched = begin(rig, case)
    ended = outcome(rig, launched, strike(rig, launched, case))
    assert "setup failed on the machine" in launched.text
    check(case, ended)
    note(name, ended, begun)


def kill(processes: dict[int, str]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------ in CI


def test_g01_killed_when_the_provider_has_just_made_the_machine_its_guardian_ends_it(rig: Rig) -> None:
    case = Case("machine made", "kill9")
    launched = begin(rig, case)
    ended = outcome(rig, launched, strike(rig, launched, case))
    print(ended)
    check(case, ended)


# ------------------------------------------------------------------ SkyPilot's own minutes

_LEASE_SECONDS = 30
_SHORT = ("--lease", f"{_LEASE_SECONDS}s", "--idle", "1m")
# The promise (G4): lease + idle + 90 s.
_ENDS_ITSELF_SECONDS = _LEASE_SECONDS + 60 + 90


@pytest.mark.long
def test_g04_with_all_of_the_laptop_killed_the_step_is_saved_and_the_machine_ends_itself(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    launched = Launched(rig, [*RENTED, *_SHORT, "--", *TRAINING])
    launched.wait_for("ready: http", UP_SECONDS)
    home = launched.run / "results"
    wait_until(
        lambda: (durable.newest_step(home) or 0) >= 2, 60, lambda: f"two durable steps\n{launched.text}"
    )
    killed_at = _kill_the_laptop(rig)
    at_home = durable.newest_step(home) or 0
    there = _on_the_machine(rig, launched)
    wait_until(
        lambda: _reason(there) == "lease",
        _LEASE_SECONDS + 60,
        lambda: f"the lease's end, not {_reason(there)}",
    )
    newest = whole_checkpoints.newest_whole(there / "checkpoints")
    assert newest is not None
    committed = checkpoints.step_of(newest)
    print(f"ended by its lease after {time.time() - killed_at:.0f} s, step {committed}, at home {at_home}")
    assert at_home <= committed <= at_home + 1
    assert rig.alive()
    _ends_itself(rig, killed_at)


@pytest.mark.long
def test_p17_with_launch_and_guardian_killed_at_once_the_lease_ends_the_run_and_the_timer_the_machine(
    runtime_rig: Rig,
) -> None:
    """Nothing else is killed: SkyPilot's server, the minder and the program are left to end by themselves."""
    rig = runtime_rig
    launched = Launched(rig, [*RENTED, *_SHORT, "--", *IDLE], PYTHONPATH=small_code(rig))
    launched.wait_for("ready: http", UP_SECONDS)
    wait_until(lambda: running(rig, IDLE[1]), 120, lambda: f"the program\n{launched.text}")
    guardians = running(rig, "launcher.teardown.guardian")
    assert len(guardians) == 1
    kill(guardians)
    launched.send(signal.SIGKILL)
    killed_at = time.time()
    wait_until(lambda: not running(rig, *PROGRAMS), 60, "the program's end")
    there = _on_the_machine(rig, launched)
    wait_until(
        lambda: _reason(there) == "lease",
        _LEASE_SECONDS + 60,
        lambda: f"its lease's end: {(there / 'logs' / 'keeper.log').read_text()}",
    )
    print(f"the runtime ended by its lease after {time.time() - killed_at:.0f} s")
    assert rig.alive()
    _ends_itself(rig, killed_at)


@pytest.mark.long
def test_g03_a_failed_setup_whose_launch_and_guardian_are_killed_is_ended_by_its_autodown(rig: Rig) -> None:
    launched = begin(rig, Case("cli.pulled", "stop"), *_SHORT)
    launched.wait_for("setup failed on the machine", UP_SECONDS)
    killed_at = _kill_the_laptop(rig)
    assert rig.alive()
    _ends_itself(rig, killed_at)


def _kill_the_laptop(rig: Rig) -> float:
    """Everything of ours, of SkyPilot's, and the user's program, at once; when."""
    laptop = running(rig, *OURS, *PROGRAMS)
    kill(laptop)
    wait_until(lambda: not running(rig, *OURS, *PROGRAMS), 60, "the laptop to be dead")
    return time.time()


def _ends_itself(rig: Rig, since: float) -> None:
    wait_until(lambda: not rig.alive(), _ENDS_ITSELF_SECONDS - (time.time() - since), "the machine's end")
    print(f"terminated {time.time() - since:.0f} s after, bound {_ENDS_ITSELF_SECONDS} s")


def _on_the_machine(rig: Rig, launched: Launched) -> Path:
    """The run's folder there, seen through the machine's first process."""
    (pid,) = (pid for pid, line in running(rig, "inside/reaper.py").items() if "python" in line)
    return Path("/proc", str(pid), "root", "home", "ubuntu", "slipway", launched.run.name)


def _reason(folder: Path) -> str | None:
    """Why the keeper ended; None while it runs."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "keeper.json").read_text())["reason"]
    return None
