"""The test cloud itself: real SkyPilot launches on it, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cloud.rig import REPOSITORY, Rig, missing, wait_until

pytestmark = pytest.mark.slow

_LAUNCH = textwrap.dedent("""
    import sky, sys
    task = sky.Task.from_yaml(sys.argv[1])
    task.set_resources(sky.Resources(infra="aws", accelerators="H100:4").copy(autostop={
        "idle_minutes": 10, "down": True, "wait_for": "none"}))
    sky.stream_and_get(sky.launch(task, cluster_name="slip-0123abcd"))
    print([(c["name"], c["autostop"], c["to_down"]) for c in sky.get(sky.status())])
    sky.stream_and_get(sky.down("slip-0123abcd"))
""")
# The owner of a rig, killed while a machine runs.
_OWNER = textwrap.dedent("""
    import pathlib, sys, time
    from tests.cloud.rig import Rig
    with Rig(pathlib.Path(sys.argv[1])) as rig:
        print(*rig.processes(), flush=True)
        time.sleep(600)
""")


def test_skypilot_launches_and_ends_a_machine_by_itself(rig: Rig) -> None:
    yaml = str(REPOSITORY / "sky" / "arm.yaml")
    said = rig.run([sys.executable, "-c", _LAUNCH, yaml], seconds=600).ok()
    assert "('slip-0123abcd', 10, True)" in said
    (run,) = rig.witness("run")
    assert run["type"] == "p5.24xlarge"
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert rig.alive() == []


def test_a_rig_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    command = [sys.executable, "-c", _OWNER, str(tmp_path / "rig")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) >= 2
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5, f"the end of {pids}")
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "bridge" not in links
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
