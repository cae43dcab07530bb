"""The examples with a loop of trajectories, one step each on the run that tests that train it share (B17).

How much is learnt is seen in runs of their own (`long`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from tests.support.environment import REPOSITORY
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
_SECONDS = 300
_SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def variables(pupil: Launched) -> dict[str, str]:
    """The environment of a program in this run."""
    environ = {**os.environ, "LAUNCH_HOME": str(pupil.home)}
    done = subprocess.run(
        [*pupil.executable, "env", "shared"], env=environ, capture_output=True, text=True, check=True
    )
    pairs = (line.removeprefix("export ").partition("=") for line in done.stdout.splitlines())
    return environ | {name: it.strip("'\"") for name, _, it in pairs if name.startswith("LAUNCH_")}


def _example(name: str, environ: dict[str, str], *words: str) -> dict[str, Any]:
    """What an example left in the run's folder after one short step."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--offline", "--steps", "1", *words],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((Path(environ["LAUNCH_RUN_DIR"]) / f"{name}.json").read_text())


def _last_texts(environ: dict[str, str], split: str) -> list[dict[str, Any]]:
    """The groups that were logged last."""
    folder = Path(environ["LAUNCH_RUN_DIR"])
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    step = [it["step"] for it in lines if it["split"] == split][-1]
    return [
        json.loads(line)
        for line in (folder / "trajectories" / f"{split}-{step:06d}.jsonl").read_text().splitlines()
    ]


def test_b17_temporal_clue_trains_on_puzzles_it_makes(variables: dict[str, str]) -> None:
    found = _example("temporal_clue", variables, "--puzzles", "4", "--tries", "8", "--held-out", "8")
    assert found["trained"] > 0 and found["trained"] + found["dropped"] == 32
    groups = _last_texts(variables, "train")
    assert [len(group["trajectories"]) for group in groups] == [8] * 4
    assert len({group["trajectories"][0]["messages_and_choices"][0]["content"] for group in groups}) == 4


def test_b17_the_agent_of_the_mailbox_trains_though_it_calls_no_tool(variables: dict[str, str]) -> None:
    found = _example("email_search", variables, "--questions", "4", "--tries", "4", "--held-out", "4")
    assert found["trained"] > 0 and found["trained"] + found["dropped"] == 16
    for group in _last_texts(variables, "train"):
        for one in group["trajectories"]:
            assert {it["function"]["name"] for it in one["tools"]} >= {"search_inbox", "read_email"}
            assert one["metrics"]["turns"] == 1 and -0.1 <= one["reward"] <= 0.4


def test_b17_summaries_are_trained_by_a_judges_comparison(variables: dict[str, str]) -> None:
    found = _example("summarise_ruler", variables, "--documents", "4", "--tries", "4", "--held-out", "4")
    assert found["trained"] > 0 and found["trained"] + found["dropped"] == 16
    assert found["not_judged"] == 0 and found["pairs"] == 4
    for group in _last_texts(variables, "train"):
        scores = [one["metrics"]["ruler_score"] for one in group["trajectories"]]
        assert scores == [one["reward"] for one in group["trajectories"]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["temporal_clue", "email_search", "summarise_ruler"])
def test_b17_the_held_out_score_of_each_rises_over_three_seeds(home: Path, name: str) -> None:
    """As their headers have it, a run for each seed."""
    rises = []
    for seed in _SEEDS:
        program = [sys.executable, str(EXAMPLES / f"{name}.py"), "--offline", "--seed", str(seed)]
        launched = Launched(home, ["--port", str(free_port()), "--", *program])
        try:
            assert launched.wait(1800) == 0, launched.stdout + launched.stderr
            found = json.loads((launched.run_dir / "results" / f"{name}.json").read_text())
        finally:
            launched.kill_tree()
        print(name, seed, found["before"], found["after"], found["error"])
        rises.append(found["after"] - found["before"])
    print(name, rises)
    assert mean(rises) > 2 * stdev(rises) / len(rises) ** 0.5
