"""Whole runs with an engine whose logprobs are off by bf16's noise learn as those without it (C51).

The noise is put on between the engine and the gateway, by a tap on the engine's socket: nothing of the
product knows of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.e2e.conftest import make_home
from tests.support.environment import REPOSITORY
from tests.support.launched import Launched
from tests.support.noisy_tap import NoisyTap
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

NOISE = 0.054
SEEDS, STEPS = range(3), 20
# Where a run's figures are kept as well, for RESULTS.md.
FOLDER = "SLIPWAY_LONG_DIR"


@dataclass(frozen=True)
class Learned:
    """What a run came to: right translations held out, and by step what the trainer measured."""

    before: float
    after: float
    measured: list[dict[str, float]]
    alarms: list[str]
    tokens: int

    @property
    def rise(self) -> float:
        return self.after - self.before


def learn(folder: Path, loss: str, noise: float, seed: int) -> Learned:
    """The quickstart, its engine behind the tap."""
    home = make_home(folder / "home")
    program = [sys.executable, str(REPOSITORY / "examples" / "quickstart.py")]
    words = ["--set", f"train.loss={loss}", "--port", str(free_port()), "--", *program]
    launched = Launched(home, [*words, "--steps", str(STEPS), "--seed", str(seed)], cwd=folder)
    try:
        wait_until(lambda: any(home.glob("runs/*/machine/runtime.json")), 180, "the runtime starts")
        config = json.loads((launched.run_dir / "machine" / "runtime.json").read_text())
        tap = NoisyTap(Path(config["socket_dir"]) / "engine-0.sock", noise, seed)
        tap.start()
        try:
            assert launched.wait(3600) == 0, launched.stderr
        finally:
            tap.stop()
    finally:
        launched.kill_tree()
    results = launched.run_dir / "results"
    summary: dict[str, Any] = json.loads((results / "summary.json").read_text())
    lines = [json.loads(it) for it in (results / "metrics.jsonl").read_text().splitlines()]
    told = [json.loads(it) for it in (results / "grpo.jsonl").read_text().splitlines()]
    return Learned(
        summary["before"]["score"],
        summary["after"]["score"],
        [it["metrics"] for it in lines if it["metrics"].get("updated")],
        [it["name"] for it in told if it["kind"] == "alarm"],
        tap.tokens,
    )


def note(loss: str, noise: float, seed: int, one: Learned) -> None:
    """A line for RESULTS.md, where a folder for it is given."""
    if not (folder := os.environ.get(FOLDER)):
        return
    said = {"loss": loss, "noise": noise, "seed": seed, "before": one.before, "after": one.after}
    said |= {"tokens": one.tokens, "alarms": one.alarms}
    for name in ("clip_fraction", "kl_behaviour", "grad_norm", "ratio_max"):
        said[name] = [round(it[name], 5) for it in one.measured]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "noisy_engine.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\n")


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_c51_whole_runs_learn_under_an_engines_noise_as_without(tmp_path: Path, loss: str) -> None:
    found: dict[float, list[Learned]] = {}
    for noise in (0.0, NOISE):
        for seed in SEEDS:
            folder = tmp_path / f"{loss}-{noise}-{seed}"
            folder.mkdir()
            one = learn(folder, loss, noise, seed)
            found.setdefault(noise, []).append(one)
            note(loss, noise, seed, one)
    exact, noisy = found[0.0], found[NOISE]
    assert all(it.tokens for it in noisy), "the tap saw no answer"
    for one in noisy:
        assert len(one.measured) >= STEPS - 2
        assert {it["clip_fraction"] for it in one.measured} == {0.0}
        assert fmean(it["kl_behaviour"] for it in one.measured) > 0.9 * NOISE**2 / 2, "there was no noise"
        assert one.alarms == []
    norms = [fmean(it["grad_norm"] for one in runs for it in one.measured) for runs in (exact, noisy)]
    assert norms[1] == pytest.approx(norms[0], rel=0.2)
    apart = fmean(it.rise for it in noisy) - fmean(it.rise for it in exact)
    error = math.sqrt(sum(stdev(it.rise for it in runs) ** 2 / len(SEEDS) for runs in (exact, noisy)))
    assert apart >= -2 * error, f"{apart:+.3f}, of a standard error of {error:.3f}"
    assert fmean(it.rise for it in noisy) > 0.15
