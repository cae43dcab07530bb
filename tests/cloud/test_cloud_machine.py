"""A rented machine's life through our own calls, on the test cloud: SkyPilot, sshd and signals are real."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cloud.rig import REPOSITORY, Rig, wait_until

pytestmark = pytest.mark.slow

_START = """
import json, os, sys, time
from pathlib import Path
from launcher.errors import LaunchError
from launcher.machines.base import from_record
from launcher.machines.cloud import CloudMachine
from launcher.machines.link import run_on
from launcher.safety.records import RunRecord
here = Path.cwd()
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
def keep(description):
    (here / "described.json").write_text(json.dumps(description))
machine = CloudMachine(
    "slip-0123abcd", here / "run", infra=["aws"], gpus="H100:4", idle_minutes=IDLE, variant="cpu", keep=keep
)
keep(machine.describe())
"""

_LIFE = """
machine.arm(told)
told(f"armed: {machine.price_per_hour} {machine.describe()['standing']['where']}")
folder = here / "run" / "skypilot"
assert folder.stat().st_mode & 0o777 == 0o700
told("home " + " ".join(run_on(machine.host, "ls -a ~ ~/.aws ~/.ssh").stdout.decode().split()))
machine.push()
told("pushed")
machine.run_job("setup", "ls runtime/bootstrap.py && echo $((6 * 7))", 60, progress=told)
told("job done")
try:
    machine.run_job("setup", "echo something; echo no driver here; exit 3", 60)
except LaunchError as error:
    told(f"code {error.exit_code}: {error.why}")
machine.down()
told("downed")
told(machine.proof())
assert not folder.exists()
"""

_SERVED = """
import secrets
from launcher.machines.unix_http import get_json
from runtime.schema import RuntimeConfig
token = secrets.token_urlsafe(16)
machine.arm()
told("armed")
machine.push()
told("pushed")
machine.setup(told)
told("set up")
config = RuntimeConfig(
    run_id="slip-0123abcd", model_path=MODEL, state_dir=machine.state_dir, socket_dir=machine.socket_dir
)
gateway = machine.serve(config, token, told)
told(f"served: {get_json(gateway, '/healthz')} {get_json(gateway, '/slipway/status', token)[1]['phase']}")
assert machine.ended() is None
report = machine.pull(here / "results")
told(f"pulled {report.files} files: {sorted(p.name for p in (here / 'results' / 'logs').iterdir())}")
machine.down()
told(machine.proof())
assert not gateway.exists()
"""

_NOWHERE = """
try:
    machine.arm()
except LaunchError as error:
    told(f"code {error.exit_code}: {error.message} | {error.why}")
machine.down()
told(machine.proof())
"""

_LAUNCHED = """
machine.arm(told)
"""

# Everything of the laptop dies at once after arming: what is left is the machine's own timer.
_LAPTOP_LOST = """
import signal
machine.arm()
told("armed")
machine._sky.end()
for process in machine._home.processes():
    process.send(signal.SIGKILL)
"""

_ENDED_BY_ANOTHER = """
import time
record = RunRecord("slip-0123abcd", time.time(), machine=json.loads((here / "described.json").read_text()))
other = from_record(record)
other.down()
told("downed")
told(other.proof())
"""

_REFUSED = """
other = CloudMachine.described(json.loads((here / "described.json").read_text()))
other.down()
told(other.proof())
"""


def _program(text: str, idle_minutes: int = 10) -> list[str]:
    model = str(REPOSITORY / "runtime" / "tiny" / "model")
    given = f"MODEL = {model!r}\nIDLE = {idle_minutes}\n"
    return [sys.executable, "-c", textwrap.dedent(given + _START + text)]


def _environ(rig: Rig) -> dict[str, str]:
    return rig.environ(PYTHONPATH=str(REPOSITORY))


def _left_of_skypilot(rig: Rig) -> list[str]:
    """Its processes on the laptop, under their own names and the ones it gives itself."""
    names = ("sky.server", "SkyPilot:", "sky_calls")
    return [line for line in rig.processes().values() if any(name in line for name in names)]


def test_a_machine_is_armed_pushed_to_and_down_by_the_providers_word(rig: Rig) -> None:
    said = rig.run(_program(_LIFE), seconds=600, environ=_environ(rig)).ok()
    print(said)
    assert "armed: 27.52 AWS/us-east-1" in said
    assert "code 6: no driver here" in said
    assert "Proof(verified=True" in said
    (run,) = rig.witness("run")
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert not _left_of_skypilot(rig)


def test_a_runtime_with_the_tiny_model_answers_through_the_link(runtime_rig: Rig) -> None:
    said = runtime_rig.run(_program(_SERVED), seconds=900, environ=_environ(runtime_rig)).ok()
    print(said)
    assert re.search(r"served: \(200, .*\) ready", said)
    assert "Proof(verified=True" in said
    assert not runtime_rig.alive()
    assert not _left_of_skypilot(runtime_rig)


def test_no_capacity_anywhere_is_exit_4_and_leaves_nothing(rig: Rig) -> None:
    rig.faults("no-capacity", " ".join(f"{r}{z}" for r in ("us-east-1", "us-west-2") for z in "abcdef"))
    said = rig.run(_program(_NOWHERE), seconds=600, environ=_environ(rig)).ok()
    print(said)
    assert "code 4: " in said
    assert "Proof(verified=True" in said
    assert rig.witness("run-refused") and not rig.witness("run")
    assert not _left_of_skypilot(rig)


def test_g01_machines_whose_making_was_answered_with_an_error_are_ended(rig: Rig) -> None:
    rig.faults("create-then-error")
    said = rig.run(_program(_NOWHERE), seconds=600, environ=_environ(rig)).ok()
    print(said)
    assert re.search(r"code [34]: ", said)
    assert "Proof(verified=True" in said
    assert rig.witness("run-answer-lost") and rig.witness("run")
    assert not rig.alive()


def test_g07_a_launch_that_was_killed_is_ended_by_another_process_and_only_proof_counts(rig: Rig) -> None:
    log = rig.folder / "launched.log"
    with log.open("wb") as output:
        launched = rig.start(_program(_LAUNCHED), environ=_environ(rig), stdout=output, stderr=output)
        wait_until(lambda: rig.witness("run"), 300, f"a machine\n{_tail(log)}")
        rig.send(launched, signal.SIGKILL)
    rig.faults("fail-describe")
    said = rig.run(_program(_REFUSED), seconds=600, environ=_environ(rig)).ok()
    print(said)
    assert "Proof(verified=False" in said
    rig.faults("fail-describe", None)
    said = rig.run(_program(_ENDED_BY_ANOTHER), seconds=600, environ=_environ(rig)).ok()
    print(said)
    assert "Proof(verified=True" in said
    assert not rig.alive()
    assert not _left_of_skypilot(rig)


def test_g04_an_armed_machine_ends_itself_when_everything_of_the_laptop_is_gone(rig: Rig) -> None:
    print(rig.run(_program(_LAPTOP_LOST, idle_minutes=1), seconds=600, environ=_environ(rig)).ok())
    begun = time.monotonic()
    assert not _left_of_skypilot(rig)
    assert rig.alive()
    # SkyPilot looks at the clock once a minute: idle + a tick + what a busy computer adds.
    wait_until(lambda: not rig.alive(), 240, "the machine's own timer")
    print(f"terminated {time.monotonic() - begun:.0f} s after the laptop died")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""
