"""A rented machine's life through our own calls, on the test cloud: SkyPilot, sshd and signals are real."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cloud.rig import REPOSITORY, Rig, wait_until

pytestmark = pytest.mark.slow

_START = """
import json, time
from pathlib import Path
from launcher.errors import LaunchError
from launcher.machines.recorded import from_record
from launcher.machines.cloud import CloudMachine
from launcher.safety.records import RunRecord
here = Path.cwd()
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
def keep(description):
    (here / "described.json").write_text(json.dumps(description))
machine = CloudMachine(
    "slip-0123abcd", here / "run", infra=["aws"], gpus="H100:4", idle_minutes=10, variant="cpu", keep=keep
)
keep(machine.describe())
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


def _program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(_START + text)]


def _environ(rig: Rig) -> dict[str, str]:
    return rig.environ(PYTHONPATH=str(REPOSITORY))


def _left_of_skypilot(rig: Rig) -> list[str]:
    """Its processes on the laptop, under their own names and the ones it gives itself."""
    names = ("sky.server", "SkyPilot:", "sky_calls")
    return [line for line in rig.processes().values() if any(name in line for name in names)]


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


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""
