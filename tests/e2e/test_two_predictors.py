"""A program of two predictors is trained jointly: a group and a curve for each, and the whole gets better."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import free_port
from tests.support.launched import Launched

pytestmark = pytest.mark.slow


def test_two_predictors_are_trained_together(home: Path) -> None:
    program = ["examples/two_predictors.py", "--seed", "1"]
    launched = Launched(home, ["--port", str(free_port()), "--", sys.executable, *program])
    try:
        assert launched.wait(480) == 0, launched.stdout + launched.stderr
        results = launched.run_dir / "results"
        summary = json.loads((results / "summary.json").read_text())
        before, after = (summary[when]["predictors"] for when in ("before", "after"))
        print(before, after)
        assert set(before) == {"there", "back"}
        assert after["there"] - before["there"] >= 0.15
        # Its start is near its ceiling: seen 0.826 -> 0.840 with 0.01 of noise, so what is asked is no loss.
        assert after["back"] - before["back"] >= -0.03
        assert summary["after"]["score"] - summary["before"]["score"] >= 0.08
        steps = [json.loads(line) for line in (results / "grpo.jsonl").read_text().splitlines()]
        rewarded = [step["rewards"] for step in steps if step["kind"] == "step"]
        assert rewarded and all(set(rewards) == {"there", "back"} for rewards in rewarded)
        assert (results / "reward.png").stat().st_size > 1000
    finally:
        launched.kill_tree()
