"""What tic-tac-toe and 2048 are made of: rules, what is held out, what the tiny player is taught (B17).

That they train is seen in `tests/e2e/test_trained_by_games.py`.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.tiny_model import boards, players
from launcher.client import Trajectory
from runtime import bootstrap
from tests.support.environment import REPOSITORY
from tests.unit.test_examples import load

TTT, G2048 = load("tic_tac_toe"), load("game_2048")
GAMES = ("tic_tac_toe", "game_2048")


class Scripted:
    """A player at the table that says these cells; None is a move that is not allowed."""

    def __init__(self, mark: str, *cells: str | None) -> None:
        self.mark, self.cells, self.trajectory = mark, [*cells], Trajectory()

    async def move(self, board: list[str]) -> str | None:
        return self.cells.pop(0)


def outcome(policy: Scripted, other: Any, board: list[str]) -> tuple[float, dict[str, Any]]:
    game = asyncio.run(TTT.play(policy, other, board))
    return game.reward, game.metrics


def test_b17_a_win_a_draw_a_loss_and_a_move_that_is_not_allowed_earn_what_is_said() -> None:
    board = list("XOXdefghi")  # O is next
    assert outcome(Scripted("O", "e", "h"), Scripted("X", "d"), board)[0] == TTT.WIN
    assert outcome(Scripted("O", "d", "f"), Scripted("X", "e", "g"), board)[0] == TTT.LOSS
    assert outcome(Scripted("O", "e", "d", "i"), Scripted("X", "h", "f", "g"), board)[0] == TTT.DRAW
    reward, metrics = outcome(Scripted("O", "e", None), Scripted("X", "d"), board)
    assert reward == TTT.NOT_ALLOWED and metrics == {"won": 0, "moves": 2, "not_allowed": 1}
    reward, metrics = outcome(Scripted("O", "e"), Scripted("X", None), board)
    assert reward == TTT.WIN and metrics["not_allowed"] == 0, "the other's fault"


@pytest.mark.parametrize(
    ("said", "cell"),
    [(" e", "e"), ("E.", "e"), ("**e**\n", "e"), ("`e`", "e"), ("x", None), ("ef", None), ("", None)],
)
def test_b17_a_cell_is_read_however_it_is_decorated(said: str, cell: str | None) -> None:
    class Says:
        class chat:  # noqa: N801 - as the SDK has it
            class completions:  # noqa: N801
                @staticmethod
                async def create(**_: Any) -> Any:
                    message = SimpleNamespace(content=said, tool_calls=None)
                    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    assert asyncio.run(TTT.Policy(Says, "policy", "O").move(list("XOXdefghi"))) == cell


def test_b17_no_opening_that_is_judged_is_trained_on_and_each_side_moves_in_its_turn() -> None:
    for marks in (2, 3):
        trained, held_out = (
            {TTT.format_board(it) for it in TTT.openings(marks, kind)} for kind in (False, True)
        )
        assert held_out and len(trained) > 2 * len(held_out) and not trained & held_out
        assert len(trained | held_out) == {2: 72, 3: 252}[marks]

    class Asked:
        seed, openings, self_play = 3, 6, True

    assert [mark for _, mark in TTT.sample_openings(Asked, 4)] == ["O", "X"] * 3
    assert (
        [*TTT.sample_openings(Asked, 4)]
        == [*TTT.sample_openings(Asked, 4)]
        != [*TTT.sample_openings(Asked, 5)]
    )


@pytest.mark.process
def test_b17_the_opponent_takes_any_free_cell_alike_and_the_same_for_its_seed() -> None:
    board = list("aXcdOfghi")
    taken = Counter(asyncio.run(TTT.RandomOpponent("X", seed).move(board)) for seed in range(3500))
    assert set(taken) == set("acdfghi") and all(400 < count < 600 for count in taken.values())
    assert (
        TTT.RandomOpponent("X", "a").order
        == TTT.RandomOpponent("X", "a").order
        != TTT.RandomOpponent("X", "b").order
    )


def test_b17_the_tiny_player_is_taught_the_boards_that_the_examples_show() -> None:
    for play in islice(boards.plays(5, "tic-tac-toe"), 50):
        assert {play.system} <= {boards.told_of_tic_tac_toe(mark) for mark in "XO"}
        for turn, chosen in zip(play.turns, play.chosen, strict=True):
            board = turn.shown.split()
            assert TTT.format_board(board) == turn.shown and set(turn.answers) == set(board) - set("XO")
            assert chosen in turn.answers and sum(turn.answers.values()) == pytest.approx(1)
    for play in islice(boards.plays(5, "2048"), 50):
        for turn, chosen in zip(play.turns, play.chosen, strict=True):
            board = [int(it.replace(".", "0")) for it in turn.shown.split()[:9]]
            assert G2048.format_board(board, 3) == turn.shown and chosen in turn.answers
            assert set(turn.answers) == set(G2048.directions(board, 3))


@pytest.mark.parametrize("name", GAMES)
def test_b17_what_a_policy_is_told_is_what_the_player_was_told(name: str) -> None:
    """By the first message of a game that nobody answers."""

    class Nobody:
        class chat:  # noqa: N801 - as the SDK has it
            class completions:  # noqa: N801
                @staticmethod
                async def create(messages: list[dict[str, str]], **_: Any) -> Any:
                    raise LookupError(messages[0]["content"])

    asked = (
        TTT.Policy(Nobody, "policy", "O").move(list("XOXdefghi"))
        if name == "tic_tac_toe"
        else G2048.Rules(3, 64, 4).play(Nobody, "policy", "one", "two")
    )
    with pytest.raises(LookupError) as told:
        asyncio.run(asked)
    assert str(told.value) in {boards.told_of_tic_tac_toe("O"), boards.told_of_2048()}


def test_b17_tiles_merge_once_in_a_move_and_what_moves_nothing_is_no_direction() -> None:
    moved = G2048.move_tiles
    assert moved([2, 2, 4, 0, 0, 0, 4, 4, 4], "left", 3) == [4, 4, 0, 0, 0, 0, 8, 4, 0]
    assert moved([2, 2, 4, 0, 0, 0, 4, 4, 4], "right", 3) == [0, 4, 4, 0, 0, 0, 0, 4, 8]
    assert moved([2, 0, 4, 2, 0, 4, 2, 8, 8], "up", 3) == [4, 8, 8, 2, 0, 8, 0, 0, 0]
    assert moved([2, 0, 4, 2, 0, 4, 2, 8, 8], "down", 3) == [0, 0, 0, 2, 0, 8, 4, 8, 8]
    assert G2048.directions([2, 4, 2, 4, 2, 4, 2, 4, 2], 3) == []
    assert G2048.directions([2, 0, 0, 0, 0, 0, 0, 0, 0], 3) == ["right", "down"]
    for seed in range(200):  # both files say the same rules
        rng = random.Random(seed)
        board = [rng.choice((0, 2, 4, 8, 16)) for _ in range(9)]
        for way in boards.DIRECTIONS:
            assert moved(board, way, 3) == boards.moved(board, way)


def test_b17_the_nearer_a_board_is_to_the_goal_the_more_it_earns_and_a_win_most() -> None:
    rules = G2048.Rules(3, 64, 32)
    rising = [[2, 2] + [0] * 7, [16, 2] + [0] * 7, [32, 8] + [0] * 7, [32, 16, 8, 4] + [0] * 5]
    rewards = [rules.reward(board) for board in rising]
    assert rewards == sorted(rewards) and rewards[0] > 0 and rewards[-1] < 1
    assert rules.reward([64] + [0] * 8) == G2048.WIN > 1
    assert rules.beginning("a") == rules.beginning("a") != rules.beginning("b")
    assert all(sum(rules.beginning(seed)) < 40 for seed in range(100))


@pytest.mark.parametrize("name", GAMES)
def test_b17_the_head_of_a_game_says_how_to_run_it_and_what_to_beat(name: str) -> None:
    head = ast.get_docstring(ast.parse((REPOSITORY / "examples" / f"{name}.py").read_text())) or ""
    assert f"launch --gpus H100 --model Qwen/Qwen2.5-3B-Instruct -- python {name}.py" in head
    assert "python -m examples.tiny_model.players --out player\n" in head
    assert f"launch --model player -- python {name}.py --offline" in head
    assert "Figure to beat: " in head.partition("Cost and duration: ")[2]
    assert name in (REPOSITORY / "examples" / "README.md").read_text()


def test_b17_a_player_is_made_in_the_runtimes_environment_and_in_no_other_that_has_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a torch has other packages beside it. A home may have a blank in its name."""
    home, prefix = tmp_path / "a home", tmp_path / "mine"
    python = home / "cache" / "environments" / "cpu" / "bin" / "python"
    for folder in (prefix, python.parent):
        folder.mkdir(parents=True)
    asked: list[list[str]] = []

    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, f"found it\n{python}\n", "")

    monkeypatch.setenv("LAUNCH_HOME", str(home))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "argv", ["players", "--out", str(tmp_path / "player")])
    monkeypatch.setattr(players.subprocess, "run", ran)
    monkeypatch.setattr(players, "make_in_this_environment", lambda folder: asked.append(["here"]))
    players.main()
    assert [command[0] for command in asked] == [sys.executable, str(python)]
    (prefix / bootstrap.MARKER).write_text("{}")
    players.main()
    assert asked[2:] == [["here"]]


def test_b17_a_player_that_other_sources_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / players.FIGURES).write_text(json.dumps({"made_of": players.digest()}))
    assert players.is_made(tmp_path) and not players.is_made(tmp_path / "nothing")
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in players.SOURCES:
        shutil.copy(players.HERE / name, sources)
    monkeypatch.setattr(players, "HERE", sources)
    assert players.is_made(tmp_path)
    (sources / "boards.py").write_text((sources / "boards.py").read_text() + "\n# more\n")
    assert not players.is_made(tmp_path)
