"""`launch --gpus local:1`: the quickstart on this computer's own GPU, from the command line to its proof."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from launcher.base.home import Home
from tests.support.environment import REPOSITORY
from tests.support.lanes import LAUNCHER_PYTHON
from tests.support.measured import say

# The CUDA build is fetched on the way up where it is not there yet.
BOUND_SECONDS = 3 * 3600
_HELD_OUT = re.compile(r"held-out: ([\d.]+) ± [\d.]+ → ([\d.]+) ± [\d.]+ over (\d+)")


def test_the_quickstart_learns_on_this_computers_own_gpu(tmp_path: Path, card: dict[str, Any]) -> None:
    python = os.environ[LAUNCHER_PYTHON]
    home = tmp_path / "home"
    home.mkdir()
    (home / "cache").symlink_to(Home.find().cache, target_is_directory=True)
    begun = time.monotonic()
    done = subprocess.run(
        [
            python,
            "-m",
            "launcher.cli.main",
            "--plain",
            "--gpus",
            "local:1",
            "--",
            python,
            "examples/quickstart.py",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "LAUNCH_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "down: verified" in said
    found = _HELD_OUT.search(said)
    assert found is not None, said[-6000:]
    before, after = float(found[1]), float(found[2])
    assert after > before + 0.1
    (record,) = home.glob("runs/*/record.json")
    machine = json.loads(record.read_text())["machine"]
    assert machine["kind"] == "local" and machine["variant"] == "cuda"
    say(
        "launch --gpus local:1 -- python examples/quickstart.py",
        seconds=round(time.monotonic() - begun),
        before=before,
        after=after,
        phrases=int(found[3]),
        **card,
    )
