"""A rented run that goes on on a new machine over a slow line: its upload outlasts its idle minutes thrice.

SkyPilot, its timer, ssh and rsync are real; the runtime has no engine.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

import pytest

from tests.cloud.launched import RENTED, Launched, left
from tests.cloud.matrix import UP_SECONDS, small_code
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long]

_IDLE_SECONDS = 60.0
# Of each of the four large files of a checkpoint: more than three minutes by the line below.
_BYTES = 3_000_000
_SLOW = """#!/bin/sh
case "$*" in *--server*|*--version*) ;; */durable/step-*) set -- --bwlimit=60 "$@";; esac
exec {rsync} "$@"
"""


def test_p02_a_resume_whose_upload_takes_three_times_its_idle_minutes_comes_up(runtime_rig: Rig) -> None:
    rig = runtime_rig
    code = os.pathsep.join([small_code(rig), str(REPOSITORY)])
    work = (sys.executable, str(PROGRAMS / "cloud" / "work_when_told.py"), str(_BYTES))
    first = Launched(rig, [*RENTED, "--name", "demo", "--idle", "1m", "--", *work], PYTHONPATH=code)
    first.wait_for("ready: http", UP_SECONDS)
    (first.run / "results" / "train").touch()
    (first.run / "results" / "end").touch()
    assert first.wait(UP_SECONDS) == 0, first.text

    (first.run / "results" / "end").unlink()
    tools = rig.folder / "tools"
    tools.mkdir()
    (tools / "rsync").write_text(_SLOW.format(rsync=shutil.which("rsync")))
    (tools / "rsync").chmod(0o755)
    path = f"{tools}{os.pathsep}{rig.environ()['PATH']}"
    resumed = Launched(rig, ["--resume", "demo", "-y"], PYTHONPATH=code, PATH=path)
    resumed.wait_for("launch ssh demo", UP_SECONDS)
    begun = time.monotonic()
    resumed.wait_for("ready: http", UP_SECONDS)
    print(resumed.text)
    assert time.monotonic() - begun > 3 * _IDLE_SECONDS
    assert "resuming after step 1" in resumed.text and len(rig.alive()) == 1
    (first.run / "results" / "end").touch()
    assert resumed.wait(UP_SECONDS) == 0, resumed.text
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")
