"""launcher/run/ending.py on a home that is full from some phase on: a real file system of 512 KiB.

`test_ending_record.py` has the same with a real guardian and a real program, where it fills up in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.pretend_calls import PHASES

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How the runs were, by the phase in which the disk was full; where this user may mount a small one."""
    program = PROGRAMS / "unit" / "fill_small_disk.py"
    mount = 'mount -t tmpfs -o size=512k none "$1" && exec "$2" "$3" "$1"'
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            mount,
            "sh",
            tmp_path_factory.mktemp("small"),
            sys.executable,
            program,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_g27_on_a_full_disk_nothing_is_begun(lives: dict[str, dict[str, Any]]) -> None:
    said = lives["before"]
    assert said["full_bytes"] > 0
    assert (said["code"], said["asked"], said["state"]) == (3, [], None)


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_g27_a_disk_that_is_full_from_some_phase_on_stops_no_end(
    lives: dict[str, dict[str, Any]], phase: str
) -> None:
    said, at = lives[phase], PHASES.index(phase)
    assert said["full_bytes"] > 0, "the disk was full"
    assert said["code"] == (8 if phase == "pull" else 3), said["stderr"]
    assert "Traceback" not in said["stderr"]
    assert ("pull" in said["asked"]) == (at >= PHASES.index("serve"))
    assert said["asked"][-2:] == ["down", "proof"]
    # Nobody says that it is down while nobody could write so; and who could, later, was not let go.
    assert said["state"] == phase and not said["let_go"]
    assert (said["state_later"], said["ended_by"]) == ("verified", "gc" if phase == "created" else "guardian")
    assert said["at_home"] == (phase in ("work", "pull", "down"))
