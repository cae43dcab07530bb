"""examples/papillon.py offline, on a real engine and trainer: in the run that other tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.client import connect
from tests.support.environment import REPOSITORY
from tests.support.launched import Launched

pytestmark = pytest.mark.slow


def test_a08_a20_both_predictors_are_trained_and_the_untrusted_model_is_not_the_policy(
    endpoint: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with what --openai-env sets: OpenAI's address and key mean this run for whoever names no other."""
    monkeypatch.setenv("LAUNCH_HOME", str(endpoint.home))
    run = connect("shared")
    samples = run.status().samples
    environ = {
        **os.environ, "LAUNCH_BASE_URL": run.base_url, "LAUNCH_API_KEY": run.api_key,
        "LAUNCH_RUN_DIR": str(tmp_path), "OPENAI_BASE_URL": run.base_url, "OPENAI_API_KEY": run.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip
    options = ["--offline", "--steps", "2", "--examples", "2", "--held-out", "4"]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "examples" / "papillon.py", *options],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "summary.json").read_text())["training"]["report"]
    rollouts, evaluated = 2 * 2 * 8, 4 * 4
    assert (report["steps"], report["rollouts"], report["groups"]) == (2, rollouts, 2 * 2 * 2)
    flat = {"no variance in its group"}
    assert report["members"] == report["samples"] == report["trained"] + sum(report["dropped"].values())
    assert report["trained"] and set(report["dropped"]) <= flat, "no group is wasted"
    assert not report["outside"] and set(report["outcomes"]) <= {"scored", "unparsed"}
    rewards = run.metrics(after=run.status().step - 1)[0]["metrics"]
    assert {"reward/craft", "reward/respond"} <= set(rewards)
    # Two calls a run, and none of the untrusted model's: it would have been a third.
    assert run.status().samples - samples <= 2 * (rollouts + evaluated)
