"""The real SkyPilot reads our task files; they open no port and carry no secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import PROGRAMS

TASKS = sorted((Path(__file__).resolve().parents[2] / "sky").glob("*.yaml"))


def test_there_is_a_task() -> None:
    assert TASKS


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.name)
def test_a_task_opens_no_port_and_carries_no_variables(path: Path) -> None:
    import yaml

    task = yaml.safe_load(path.read_text())
    assert "ports" not in task.get("resources", {})
    assert not {"envs", "secrets"} & set(task)


@pytest.mark.slow
@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.name)
def test_skypilot_reads_the_task_and_its_autodown(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "read_sky_task.py", path],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
