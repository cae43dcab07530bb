"""`launch --gpus H100:4` as a user types it, on the test cloud: SkyPilot, sshd, vLLM, trainer and signals are
real; the price is the test catalog's, the GPUs are this computer's CPUs."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from tests.cloud.entered import enter_the_machine, home_and_gone, skypilots_server_rests
from tests.cloud.launched import EVERYWHERE, RENTED, Launched, left, verb
from tests.cloud.rig import Rig
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.long  # in every run: test_secrets.py's two steps
def test_the_whole_quickstart_learns_on_a_rented_machine_comes_home_and_leaves_nothing(
    runtime_rig: Rig,
) -> None:
    launched = Launched(runtime_rig, [*RENTED, "--", "python", "examples/quickstart.py"])
    launched.wait_for("ready: http", 900)
    skypilots_server_rests(runtime_rig)
    enter_the_machine(runtime_rig, launched)
    assert launched.wait(1800) == 0, launched.text
    print(launched.text)
    home_and_gone(runtime_rig, launched, steps=30)
    summary = json.loads((launched.run / "results" / "summary.json").read_text())
    # The best policy may be an earlier one: going back to it is a step as well.
    assert summary["steps"] == 30 + (summary["training"]["restored"] is not None)
    # It learns there as it does here: the bound of tests/e2e/test_quickstart.py.
    assert summary["rise"] > 0.25


@pytest.mark.long  # in every run: test_played_launch.py's next zone, test_leaving.py's ends
def test_no_capacity_in_one_region_is_the_next_one_and_a_failing_setup_leaves_nothing(rig: Rig) -> None:
    rig.faults("no-capacity", " ".join(f"us-east-1{zone}" for zone in "abcdef"))
    # And a provider that is slow to end it, and at first refuses to.
    rig.faults("slow-terminate", "2")
    rig.faults("refuse-terminate")
    threading.Thread(target=_lift_the_refusal, args=(rig,), daemon=True).start()
    launched = Launched(rig, [*RENTED, "--", "true"])
    assert launched.wait(1200) == 6, launched.text
    print(launched.text)
    assert "us-west-2" in launched.text
    assert "setup failed on the machine" in launched.text
    assert "down: verified" in launched.text
    (run,) = rig.witness("run")
    assert run["region"] == "us-west-2"
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert rig.witness("terminate-refused")
    assert f"{launched.run.name}: ending it by name failed" in (launched.run / "launch.log").read_text()
    # What it said last is shown, one line as the reason; all it said stays, after the machine has gone.
    assert launched.text.count("\n  | ") > 1, launched.text
    whole = verb(rig, "logs", launched.run.name, "--which", "setup").splitlines()
    assert f"  {whole[-1].strip()}\nHint: launch logs {launched.run.name} --which setup" in launched.text
    assert "of disk free" in whole[0]
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


def _lift_the_refusal(rig: Rig) -> None:
    """As soon as it has been met."""
    wait_until(lambda: rig.witness("terminate-refused"), 1200, "a refusal")
    rig.faults("refuse-terminate", None)


@pytest.mark.long  # in every run: test_played_launch.py's
def test_no_capacity_anywhere_is_exit_4_and_leaves_nothing_behind(rig: Rig) -> None:
    rig.faults("no-capacity", EVERYWHERE)
    launched = Launched(rig, [*RENTED, "--", "true"])
    assert launched.wait(900) == 4, launched.text
    print(launched.text)
    assert rig.witness("run-refused") and not rig.witness("run")
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


def test_g02_ctrl_c_while_provisioning_ends_the_request_and_the_machine(rig: Rig) -> None:
    launched = Launched(rig, [*RENTED, "--", "true"])
    wait_until(lambda: rig.witness("run"), 900, lambda: f"a machine\n{launched.text}")
    launched.send(signal.SIGINT)
    assert launched.wait(600) == 130, launched.text
    print(launched.text)
    assert not rig.alive()
    assert launched.record["state"] == "verified"
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")


@pytest.mark.long  # in every run: test_run.py's, with a machine that takes its time in this process
def test_g06_a_budget_that_is_spent_on_the_way_up_ends_the_machine_with_7(rig: Rig) -> None:
    """$0.45 are a minute of this machine, from the first call on; nothing here would end it by itself."""
    words = [*RENTED, "--budget", "0.45", "--", "true"]
    launched = Launched(rig, words, LAUNCH_FAILPOINT="cloud.pushed:hang")
    assert launched.wait(900) == 7, launched.text
    print(launched.text)
    assert "the budget of $0.45 is spent" in launched.text
    assert rig.witness("run") and not rig.alive()
    assert launched.record["state"] == "verified"
    spent_at, created = rig.witness("terminate")[0]["time"], launched.record["created"]
    assert spent_at - created < 0.45 / 27.52 * 3600 + 30
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")
