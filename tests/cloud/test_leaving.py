"""How a rented run ends when its end goes wrong, and goes on when it was killed; as a user types it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cloud.launched import LAUNCH, RENTED, Launched, collect, left, running, verb
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_STEPS = 5
_QUICKSTART = ("--", "python", "examples/quickstart.py", "--steps", str(_STEPS))


def test_g01_machines_whose_making_was_answered_with_an_error_are_ended(rig: Rig) -> None:
    rig.faults("create-then-error", "RequestExpired")
    launched = Launched(rig, [*RENTED[:2], "--infra", "aws/us-east-1/us-east-1a", "-y", "--", "true"])
    assert launched.wait(900) in (3, 4), launched.text
    print(launched.text)
    assert "down: verified" in launched.text
    made = [one["id"] for one in rig.witness("run")]
    assert made and rig.witness("run-answer-lost")
    assert {one["id"] for one in rig.witness("terminate")} == set(made)
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


# In every run each of its steps, on played clouds: `test_played_ends.py`, `test_take_down_errors.py`.
@pytest.mark.long
def test_g07_unproven_is_exit_5_and_tried_again_and_its_name_is_nobody_elses(rig: Rig) -> None:
    rig.faults("deny-region", "us-west-2")  # and never tried: it keeps nothing from being proven (P4)
    launched = Launched(rig, [*RENTED, "--name", "demo", "--", "true"])
    wait_until(lambda: rig.witness("run"), 900, lambda: f"a machine\n{launched.text}")
    second = rig.run([LAUNCH, *RENTED, "--name", "demo", "--", "true"], environ=rig.environ(NO_COLOR="1"))
    assert second.code == 2 and "a run named demo is live" in second.output
    assert "launch status demo" in second.output

    launched.wait_for("launch ssh demo", 900)
    # Armed, and its dead-man called off (P3).
    assert launched.record["machine"]["unarmed_seconds"] > 0 and not running(rig, "slipway-unarmed")
    rig.faults("fail-describe")  # the setup fails here, and then the end
    assert launched.wait(900) == 5, launched.text
    print(launched.text)
    assert "from asking for the machine to its own armed timer" in launched.text
    (run,) = rig.witness("run")
    name = f"{launched.record['id']}-{launched.record['id'].removeprefix('slip-')}"
    assert "could not verify that everything is down" in launched.text
    look = f"aws ec2 describe-instances --region us-east-1 --filters Name=tag:ray-cluster-name,Values={name}"
    assert look in launched.text
    assert "launch down demo" in launched.text
    assert launched.record["state"] in ("unverified", "down") and rig.alive() == [run["id"]]

    log = launched.run / "guardian.log"
    wait_until(lambda: "taking the machine down" in log.read_text(), 120, "the guardian's own attempt")
    for pid in running(rig, "launcher.teardown.guardian"):
        os.kill(pid, signal.SIGKILL)
    assert "left alone: launch down demo" in verb(rig, "status", "demo")
    rig.faults("fail-describe", None)
    removed = collect(rig, "--yes")
    print(removed.output)
    assert "down: verified" in removed.ok()
    assert launched.record["state"] == "verified" and launched.record["ended_by"] == "gc"
    assert "AWS us-west-2 gives no list, but no machine was ever asked for there" in str(launched.record)
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


@pytest.mark.long
def test_g21_g22_a_killed_run_goes_on_on_a_new_machine_which_is_kept_while_its_results_are_not_home(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    launched = Launched(rig, [*RENTED, "--max", "30m", "--name", "demo", "--lease", "1m", *_QUICKSTART])
    wait_until(lambda: _durable(rig) >= 2, 1800, lambda: f"two durable steps\n{launched.text}")
    launched.send(signal.SIGKILL)
    wait_until(lambda: launched.record["state"] == "verified", 600, "the guardian")
    print(launched.text)
    assert not rig.alive()
    step = _durable(rig)

    resumed = Launched(rig, ["--resume", "demo", "-y"])
    resumed.wait_for("ready: http", 1200)
    assert f"resuming after step {step}" in resumed.text
    assert "the machine's state is lost" in resumed.text
    (machine,) = rig.alive()
    _break_rsync(rig)
    resumed.wait_for("the machine is kept for", 1200)
    assert "$27.52/h" in resumed.text.rpartition("the machine is kept")[2]
    assert rig.alive() == [machine]
    assert resumed.wait(900) == 8, resumed.text
    print(resumed.text)
    assert not rig.alive()
    summary = json.loads((resumed.run / "results" / "summary.json").read_text())
    assert summary["steps"] == _STEPS
    assert len(rig.witness("run")) == 2 == len({one["id"] for one in rig.witness("terminate")})
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


def _durable(rig: Rig) -> int:
    """The newest step that is at home."""
    steps = (rig.folder / "launch" / "runs").glob("*/results/durable/step-*")
    return max((int(step.name.removeprefix("step-")) for step in steps), default=0)


def _break_rsync(rig: Rig) -> None:
    """Nothing can be copied from the machine any more."""
    config = rig.home / ".ssh" / "config"
    broken = "sudo sh -c 'printf \"#!/bin/sh\\nexit 13\\n\" > /usr/bin/rsync'"
    rig.run(["ssh", "-F", str(config), "demo", broken], cwd=Path(REPOSITORY)).ok()
