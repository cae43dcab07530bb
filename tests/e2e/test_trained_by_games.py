"""The games of the examples on the tiny player: a short form of each, and in `long` what they learn.

One run for all of them. What `launch` would set for a program is set here, which is what `launch env` is for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import hypot
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from tests.e2e.conftest import make_home
from tests.support.environment import REPOSITORY
from tests.support.launched import Launched
from tests.support.player import player_folder
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
SEEDS = (0, 1, 2)
_SECONDS = 300
_LONG_SECONDS = 5400
# Reasons for which an answer is left out: they say that a group taught nothing, not that something was lost.
TAUGHT_NOTHING = {"no variance in its group"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a program in a run of the player."""
    home = make_home(tmp_path_factory.mktemp("games") / "home")
    asked = ["--model", str(player_folder()), "--name", "games", "--port", str(free_port())]
    launched = Launched(home, asked)
    try:
        launched.wait_for_text("ready: http", 900)
        environ = {**os.environ, "LAUNCH_HOME": str(home)}
        done = subprocess.run(
            [*launched.executable, "env", "games"], env=environ, capture_output=True, text=True, check=True
        )
        pairs = (line.removeprefix("export ").partition("=") for line in done.stdout.splitlines())
        found = {name: value.strip("'\"") for name, _, value in pairs if name.startswith("LAUNCH_")}
        yield environ | found
        launched.interrupt()
        assert launched.wait(900) == 130
    finally:
        if launched.process.poll() is None:
            launched.kill_tree()


def _played(name: str, environ: dict[str, str], *words: str) -> dict[str, Any]:
    """What a game left in the run's folder."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--offline", *words],
        cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((Path(environ["LAUNCH_RUN_DIR"]) / f"{name}.json").read_text())


def _all_joined(found: dict[str, Any]) -> None:
    """Turns are learned as one sequence, and whatever is left out is left out for a reason with a name."""
    assert found["trained"] > 0 and found["joined"] > found["trained"] / 3
    assert found["sealed"] == 0
    assert set(found["dropped"]) <= TAUGHT_NOTHING


def test_b17_the_player_is_small_and_answers_with_a_move_that_is_allowed(table: dict[str, str]) -> None:
    figures = json.loads((player_folder() / "FIGURES.json").read_text())
    assert figures["parameters"] < 500_000
    assert set(figures["allowed"]) == {"tic-tac-toe", "2048"} and min(figures["allowed"].values()) >= 0.9


def test_b17_a_game_of_tic_tac_toe_is_learned_as_one_conversation(table: dict[str, str]) -> None:
    short = ("--steps", "1", "--openings", "4", "--held-out", "8")
    _all_joined(_played("tic_tac_toe", table, *short))


def test_b17_in_self_play_an_earlier_version_is_the_opponent(table: dict[str, str]) -> None:
    short = ("--self-play", "--steps", "2", "--openings", "4", "--held-out", "8")
    found = _played("tic_tac_toe", table, *short)
    _all_joined(found)
    assert found["self_play"]


def test_b17_a_game_of_2048_is_learned_as_one_conversation(table: dict[str, str]) -> None:
    short = ("--steps", "1", "--beginnings", "3", "--held-out", "4", "--moves", "6")
    _all_joined(_played("game_2048", table, *short))


@pytest.mark.long
@pytest.mark.parametrize("name", ["tic_tac_toe", "game_2048"])
def test_b17_what_a_game_teaches_shows_on_held_out_positions(name: str, tmp_path: Path) -> None:
    """Three seeds: a rise of more than two standard errors, and a start of at most 60 % of the end."""
    runs: list[dict[str, Any]] = []
    home = make_home(tmp_path / "home")
    for seed in SEEDS:
        program = [sys.executable, str(EXAMPLES / f"{name}.py"), "--offline", "--seed", str(seed)]
        asked = ["--model", str(player_folder()), "--port", str(free_port()), "--name", f"seed-{seed}"]
        launched = Launched(home, [*asked, "--", *program])
        assert launched.wait(_LONG_SECONDS) == 0, launched.stdout[-3000:] + launched.stderr[-3000:]
        found = json.loads((launched.run_dir / "results" / f"{name}.json").read_text())
        print(json.dumps(found))
        runs.append(found)
    before, after = ([it[when]["won"] for it in runs] for when in ("before", "after"))
    assert mean(before) <= 0.6 * mean(after)
    rises = [end - start for start, end in zip(before, after, strict=True)]
    assert mean(rises) > 2 * stdev(rises) / len(rises) ** 0.5
    for it in runs:
        assert it["before"]["allowed"] >= 0.9
        assert it["after"]["won"] - it["before"]["won"] > 2 * hypot(
            it["before"]["error"], it["after"]["error"]
        )
