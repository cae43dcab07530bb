"""The results of a rented run at a hard end, as a user types it: a long copy, and one that never works.

The runtime has no engine (`small_runtime.py`); SkyPilot, ssh, rsync and the checkpoints are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from launcher import checkpoints, durable
from tests.cloud.launched import LAUNCH, OURS, RENTED, Launched, collect, left, running, verb
from tests.cloud.matrix import ASKING, PROGRAMS, UP_SECONDS, small_code
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]

_STEPS = 3
# What takes the place of the machine's own rsync, which is beside it.
_SLOW = ("#!/bin/sh", "sleep 20", 'exec /usr/bin/rsync.real "$@"')
_BROKEN = ("#!/bin/sh", "exit 13")


def _trained(rig: Rig) -> Launched:
    """A rented run named dev that has trained its steps, all of them durable, and holds its endpoint."""
    words = [*RENTED, "--name", "dev", "--", *ASKING, str(_STEPS), "hold"]
    launched = Launched(rig, words, PYTHONPATH=small_code(rig))
    wait_until(
        lambda: launched.process.poll() is not None or _durable(rig) == _STEPS,
        UP_SECONDS,
        lambda: f"its steps\n{launched.text}",
    )
    assert _durable(rig) == _STEPS, launched.text
    return launched


def _durable(rig: Rig) -> int:
    runs = (rig.folder / "launch" / "runs").glob("slip-*")
    return max((durable.newest_step(run / "results") or 0 for run in runs), default=0)


def _there(rig: Rig, launched: Launched) -> Path:
    """The run's folder on the machine, seen through the machine's first process."""
    (pid,) = (pid for pid, line in running(rig, "inside/reaper.py").items() if "python" in line)
    return Path("/proc", str(pid), "root", "home", "ubuntu", "slipway", launched.run.name)


def _rsync_becomes(rig: Rig, lines: tuple[str, ...]) -> None:
    """On the machine, from now on."""
    script, rsync = " ".join(f"'{line}'" for line in lines), "/usr/bin/rsync"
    command = f"sudo mv {rsync} {rsync}.real && printf '%s\\n' {script} | sudo tee {rsync}"
    command += f" && sudo chmod 755 {rsync}"
    config = rig.home / ".ssh" / "config"
    rig.run(["ssh", "-F", str(config), "dev", command], cwd=REPOSITORY).ok()


def test_g28_g22_down_during_a_long_pull_waits_for_it_and_what_is_at_home_is_what_the_machine_had(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    launched = _trained(rig)
    _rsync_becomes(rig, _SLOW)
    there = _there(rig, launched) / "checkpoints"
    (newest, *_) = checkpoints.names(there)
    promised = checkpoints.read_manifest(there / newest).text
    launched.send(signal.SIGTERM)
    wait_until(lambda: launched.record["state"] == "pull", 600, lambda: f"the pull\n{launched.text}")
    said = verb(rig, "down", "dev")
    print(launched.text, said)
    assert "dev is down: verified" in said
    assert launched.wait(600) == 143, launched.text
    home = launched.run / "results" / durable.FOLDER / newest
    assert checkpoints.read_manifest(home).text == promised and checkpoints.is_whole(home)
    (run,) = rig.witness("run")
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert launched.record["ended_by"] == "launch" and launched.record["unpulled"] is None
    assert not left(rig)


def test_g29_a_machine_whose_results_do_not_come_is_kept_by_launch_by_down_and_by_gc_until_they_are_given_up(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    launched = _trained(rig)
    _rsync_becomes(rig, _BROKEN)
    alive = rig.alive()
    launched.send(signal.SIGTERM)
    launched.wait_for("the machine is kept for", 600)
    kept = rig.run([LAUNCH, "down", "dev"], environ=rig.environ(NO_COLOR="1"))
    print(kept.output)
    assert kept.code == 8 and "dev is kept" in kept.output and rig.alive() == alive

    for pid in running(rig, *OURS, *PROGRAMS):  # nobody of the laptop is left who looks after it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not running(rig, *OURS, *PROGRAMS), 60, "the laptop to be dead")
    for ended in (rig.run([LAUNCH, "down", "dev"], environ=rig.environ(NO_COLOR="1")), collect(rig, "--yes")):
        print(ended.output)
        assert ended.code == 8 and "--give-up-results" in ended.output
        assert rig.alive() == alive
    assert "dev is down: verified" in verb(rig, "down", "dev", "--give-up-results")
    assert rig.alive() == [] and launched.record["unpulled"]
    assert not left(rig)
