"""The test cloud itself: real SkyPilot launches on it, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cloud.rig import REPOSITORY, Rig, missing
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_LAUNCH = str(PROGRAMS / "cloud" / "launch_with_skypilot.py")
_OWNER = str(PROGRAMS / "cloud" / "own_a_rig.py")


@pytest.mark.long  # in every run: what each launch of ours shows of the test cloud as well
def test_skypilot_launches_and_ends_a_machine_by_itself(rig: Rig) -> None:
    yaml = str(REPOSITORY / "sky" / "arm.yaml")
    said = rig.run([sys.executable, _LAUNCH, yaml], seconds=1800).ok()
    assert "('slip-0123abcd', 10, True)" in said
    (run,) = rig.witness("run")
    assert run["type"] == "p5.24xlarge"
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert rig.alive() == []


def test_a_rig_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, _OWNER, str(tmp_path / "rig")]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) >= 2
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), what=f"the end of {pids}")
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "bridge" not in links
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
