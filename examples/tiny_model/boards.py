"""Two games for the tiny player: a board's legal moves, its text, and lines of play to imitate.

Neighbours: `players.py` teaches a model these lines; `examples/tic_tac_toe.py` and `examples/game_2048.py`
play the same games and write their boards the same way, which a test holds them to. Knows nothing of models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

CELLS = "abcdefghi"
GAMES = ("tic-tac-toe", "2048")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
DIRECTIONS = ("left", "right", "up", "down")
SIDE = 3
# The share of imitated players of tic-tac-toe who look for a line of three.
LOOKING = 0.1
# Of a game of 2048 so many moves are imitated at most; they begin anywhere in it.
MOST_MOVES = 26
MOST_MOVES_BEFORE = 16


@dataclass(frozen=True)
class Turn:
    """A board as the player is shown it, and how likely each answer to it is in the crowd."""

    shown: str
    answers: dict[str, float]


@dataclass(frozen=True)
class Play:
    """One conversation: the player's instructions, its turns, and the answer to each of them."""

    system: str
    turns: tuple[Turn, ...]
    chosen: tuple[str, ...]

    def one_turn(self) -> Play:
        """Its middle turn, as if the conversation began there."""
        middle = len(self.turns) // 2
        return Play(self.system, self.turns[middle : middle + 1], self.chosen[middle : middle + 1])


def plays(seed: int, game: str) -> Iterator[Play]:
    """Endless lines of play of one of `GAMES`."""
    rng = random.Random(seed)
    while True:
        yield tic_tac_toe(rng) if game == "tic-tac-toe" else merging(rng)


def told_of_tic_tac_toe(mark: str) -> str:
    """The instructions for a player of tic-tac-toe."""
    return f"You play tic-tac-toe as {mark}. Answer with the letter of a free cell."


def shown_of_tic_tac_toe(board: list[str]) -> str:
    """Three rows; a free cell is its letter."""
    return "\n".join("".join(f" {cell}" for cell in board[row : row + SIDE]) for row in (0, 3, 6))


def tic_tac_toe(rng: random.Random) -> Play:
    """One side's view of a game between two of the crowd."""
    mark = rng.choice("XO")
    board, turns, chosen = [*map(str, CELLS)], list[Turn](), list[str]()
    for number in range(9):
        mover = "XO"[number % 2]
        answers = _crowd(board, mover)
        cell = rng.choices([*answers], [*answers.values()])[0]
        if mover == mark:
            turns.append(Turn(shown_of_tic_tac_toe(board), answers))
            chosen.append(cell)
        board[CELLS.index(cell)] = mover
        if has_line(board, mover):
            break
    if not turns:
        return tic_tac_toe(rng)
    return Play(told_of_tic_tac_toe(mark), tuple(turns), tuple(chosen))


def has_line(board: list[str], mark: str) -> bool:
    """Whether a line of three is complete."""
    return any(all(board[cell] == mark for cell in line) for line in LINES)


def _crowd(board: list[str], mark: str) -> dict[str, float]:
    """Any free cell alike; the few who look take one that completes a line of theirs, or the other's."""
    free = [cell for cell in CELLS if cell in board]
    share = {cell: 1.0 / len(free) for cell in free}
    for who in (mark, "XO"[mark == "X"]):
        found = [cell for cell in free if has_line([who if it == cell else it for it in board], who)]
        if found:
            return {it: (1 - LOOKING) * share[it] + LOOKING * (it in found) / len(found) for it in free}
    return share


def told_of_2048(side: int = SIDE) -> str:
    """The instructions for a player of 2048."""
    return f"You play 2048 on {side} rows of {side}. Answer with one of the directions below the board."


def shown_of_2048(board: list[int], side: int = SIDE) -> str:
    """The rows, a dot where nothing stands, and below them the directions in which something moves."""
    cells = [f" {it or '.'}" for it in board]
    rows = ["".join(cells[at : at + side]) for at in range(0, side * side, side)]
    return "\n".join([*rows, "".join(f" {way}" for way in directions(board, side))])


def merging(rng: random.Random) -> Play:
    """A stretch of a game of 2048 played at random."""
    board = dropped(dropped([0] * SIDE * SIDE, rng), rng)
    before, turns, chosen = rng.randrange(MOST_MOVES_BEFORE), list[Turn](), list[str]()
    for number in range(before + MOST_MOVES):
        free = directions(board)
        if not free:
            break
        way = rng.choice(free)
        if number >= before:
            turns.append(Turn(shown_of_2048(board), {it: 1 / len(free) for it in free}))
            chosen.append(way)
        board = dropped(moved(board, way), rng)
    return Play(told_of_2048(), tuple(turns), tuple(chosen)) if turns else merging(rng)


def moved(board: list[int], way: str, side: int = SIDE) -> list[int]:
    """The board after all tiles moved that way: two equal ones that meet are one of twice the number."""
    across = way in ("up", "down")
    rows = [board[at : at + side] for at in range(0, side * side, side)]
    rows = [list(it) for it in zip(*rows, strict=True)] if across else rows
    rows = [_pushed(it[::-1])[::-1] if way in ("right", "down") else _pushed(it) for it in rows]
    rows = [list(it) for it in zip(*rows, strict=True)] if across else rows
    return [it for row in rows for it in row]


def _pushed(row: list[int]) -> list[int]:
    """A row whose tiles are pushed to its beginning."""
    tiles, pushed = [it for it in row if it], list[int]()
    while tiles:
        tile = tiles.pop(0)
        pushed.append(tile + tiles.pop(0) if tiles and tiles[0] == tile else tile)
    return pushed + [0] * (len(row) - len(pushed))


def directions(board: list[int], side: int = SIDE) -> list[str]:
    """The ways in which something moves."""
    return [way for way in DIRECTIONS if moved(board, way, side) != board]


def dropped(board: list[int], rng: random.Random) -> list[int]:
    """The board with a new tile: a 2, one time in ten a 4."""
    place = rng.choice([at for at, it in enumerate(board) if not it])
    return [*board[:place], 2 if rng.random() < 0.9 else 4, *board[place + 1 :]]
