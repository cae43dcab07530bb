"""The loop of examples/guides/trajectories.md, run as it is printed (B10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.queue_run import QueueRun
from tests.support.environment import REPOSITORY
from tests.support.readmes import fences
from tests.support.small_run import TOKEN

MOST_LINES = 35


def test_b10_the_loop_of_the_readme_trains_as_it_is_printed(tmp_path: Path) -> None:
    guide = REPOSITORY / "examples" / "guides" / "trajectories.md"
    (program,) = [it.text for it in fences(guide) if "gather_trajectory_groups(" in it.text]
    assert program.count("\n") <= MOST_LINES
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "loop.py").write_text(program)
    run = QueueRun(state=tmp_path / "machine")
    run.answer = lambda asked: "a" * (1 + len(run.asked) % 7)
    try:
        done = subprocess.run(
            [sys.executable, tmp_path / "loop.py"],
            env={**os.environ, "LAUNCH_BASE_URL": run.base_url, "LAUNCH_API_KEY": TOKEN,
                 "LAUNCH_RUN_DIR": str(home), "PYTHONPATH": str(REPOSITORY)},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        steps = [run.checkpoint_store.load(name).state for name in run.checkpoint_store.names()]
    finally:
        run.close()
    assert [it["client_state"] for it in steps] == [{"steps": number} for number in (1, 2, 3)]
    for it in steps:
        counts = it["counts"]
        assert counts["trained"] + sum(counts["dropped"].values()) == 24
        assert counts["turns_joined"] == 12 and counts["sealed"] == 0
    lines = [json.loads(line) for line in (home / "history.jsonl").read_text().splitlines()]
    assert [(it["split"], it["trajectories"], it["groups"]) for it in lines] == [("train", 12, 3)] * 3
    assert [it["step"] for it in lines] == [1, 2, 3]
