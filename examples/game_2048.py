"""2048, as OpenPipe ART's notebook plays it: long games of one agent, each one trajectory.

    launch --gpus H100 --model Qwen/Qwen2.5-3B-Instruct -- python game_2048.py
    python -m examples.tiny_model.players --out player
    launch --model player -- python game_2048.py --offline

Cost and duration: offline $0.00 and six minutes on 2 busy cores; rented about $4 and an hour on one H100
(estimated).

The second line makes a model of some 370,000 parameters that answers a board with one of the directions in
which something moves, about any of them. Rented the board has four rows and the game is won at 128, as in the
notebook; on this computer it has three, and is won at 32. A game won earns 2, any other as much as its tiles
come near to that, and a move that is not allowed ends it with -1. Games begin a few moves in; the beginnings
and the tiles that drop while it is judged are always the same, and never trained on.

Figure to beat: 60 % of games won by Qwen2.5-3B-Instruct after ART's training, by the chart of its
repository; training added 52 points. We have no figure of our own for that model.
"""

import argparse
import asyncio
import json
import math
import random
import sys
from collections import Counter
from statistics import mean, stdev

from openai import AsyncOpenAI

from launcher.client import Trajectory, TrajectoryGroup, connect, gather_trajectory_groups

DIRECTIONS = ("left", "right", "up", "down")
WIN, NOT_ALLOWED = 2.0, -1.0
GAMES_PER_GROUP = 8
STEPS_BETWEEN_VALIDATIONS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a model 2048.")
    parser.add_argument("--offline", action="store_true", help="three rows, the tiny player, larger steps")
    parser.add_argument("--steps", type=int, default=12, help="default: 12")
    parser.add_argument("--beginnings", type=int, default=8, help="of a step, 8 games each; default: 8")
    parser.add_argument("--held-out", type=int, default=100, help="games to judge by; default: 100")
    parser.add_argument("--moves", type=int, help="of a game at most; default: 24 offline, else 80")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(train(parser.parse_args()))


async def train(args) -> None:
    """The whole training, and its result."""
    run = connect()
    client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
    rules = Rules(3, 32, args.moves or 24) if args.offline else Rules(4, 128, args.moves or 80)
    # ART's notebook has 3e-5; the tiny player learns in larger steps.
    learning_rate = 4e-3 if args.offline else 3e-5

    def games(seeds, model=run.model):
        return (rules.play(client, model, beginning_seed, tiles_seed) for beginning_seed, tiles_seed in seeds)

    async def evaluate(model=run.model, step=None):
        seeds = [(f"held-out-{place}", f"held-out-{place}") for place in range(args.held_out)]
        groups = await gather_trajectory_groups(
            (TrajectoryGroup(games([pair], model)) for pair in seeds), pbar_desc="held out"
        )
        found = score([game for group in groups for game in group])
        run.log(groups, split="val", metrics={"won": found["won"]}, step=step)
        return found

    results_file = run.run_dir / "game_2048.json" if run.run_dir else None
    steps_done = run.read_state().get("2048", 0)
    if steps_done >= args.steps and results_file and results_file.exists():
        print(f"this training had finished before: {results_file} stays as it is")
        return
    before = await evaluate("base", step=0)  # after a resume, too
    print(f"before: {format_scores(before)}")
    if before["allowed"] < 0.5:
        raise SystemExit(
            "This model does not know which moves are allowed: no game of it is worth more than another.\n"
            "  python -m examples.tiny_model.players --out player\n"
            f"  launch --model player -- python {sys.argv[0]} --offline"
        )
    counts = []
    # A program that is started again after it was stopped goes on where its last step was taken.
    for step in range(steps_done, args.steps):
        # The tiles drop alike in all games of a group, so that the games differ by the policy's moves.
        seeds = [f"{args.seed}-{step}-{place}" for place in range(args.beginnings)]
        groups = await gather_trajectory_groups(
            (TrajectoryGroup(games([(seed, seed)] * GAMES_PER_GROUP)) for seed in seeds),
            pbar_desc=f"step {step + 1}",
            max_exceptions=GAMES_PER_GROUP,
        )
        run.log(groups, split="train")
        done = run.train(groups, state={"2048": step + 1}, learning_rate=learning_rate, overlong="keep")
        counts.append(done)
        found = score([game for group in groups for game in group])
        print(
            f"step {step + 1}/{args.steps}: reward {found['reward']:.2f}, won {found['won']:.0%}, "
            f"{done.trained} answers trained, {done.joined} joined"
        )
        if (step + 1) % STEPS_BETWEEN_VALIDATIONS == 0 and step + 1 < args.steps:
            print(f"after {step + 1} steps: {format_scores(await evaluate())}")
    after = await evaluate()
    print(f"after: {format_scores(after)}")
    if results_file:
        dropped = sum((Counter(it.dropped) for it in counts), Counter())
        found = {
            "seed": args.seed, "before": before, "after": after, "dropped": dropped,
            "trained": sum(it.trained for it in counts), "joined": sum(it.joined for it in counts),
            "sealed": sum(it.sealed for it in counts),
        }  # fmt: skip
        results_file.write_text(json.dumps(found, indent=2) + "\n")


def score(games):
    """The score of finished games."""
    won = [game.metrics["won"] for game in games]
    moves = sum(game.metrics["moves"] for game in games)
    return {
        "games": len(games),
        "won": mean(won),
        "error": stdev(won) / math.sqrt(len(won)),
        "reward": mean(game.reward or 0.0 for game in games),
        "best_tile": mean(game.metrics["best_tile"] for game in games),
        "allowed": 1 - sum(game.metrics["not_allowed"] for game in games) / max(1, moves),
    }


def format_scores(found):
    """The scores with one standard error."""
    return (
        f"won {found['won']:.3f} ± {found['error']:.3f} of {found['games']} held-out games, best tile "
        f"{found['best_tile']:.0f}, {found['allowed']:.1%} of its moves allowed"
    )


class Rules:
    """A size of board, the tile that wins, and how many moves a game has."""

    def __init__(self, side, goal, moves):
        self.side, self.goal, self.moves = side, goal, moves

    async def play(self, client, model, beginning_seed, tiles_seed):
        """One game to its end, from a beginning and with tiles of these seeds."""
        board, rng = self.beginning(beginning_seed), random.Random(f"tiles {tiles_seed}")
        size = f"{self.side} rows of {self.side}"
        system_prompt = f"You play 2048 on {size}. Answer with one of the directions below the board."
        game = Trajectory(messages_and_choices=[{"role": "system", "content": system_prompt}])
        game.metrics = {"won": 0, "moves": 0, "not_allowed": 0, "best_tile": max(board)}
        for _ in range(self.moves):
            if not directions(board, self.side) or max(board) >= self.goal:
                break
            game.messages_and_choices.append({"role": "user", "content": format_board(board, self.side)})
            answer = await client.chat.completions.create(
                model=model, messages=game.messages(), max_tokens=8, temperature=1.0
            )
            game.messages_and_choices.append(answer.choices[0])
            game.metrics["moves"] += 1
            direction = (answer.choices[0].message.content or "").lower().strip(" \n.`*'\"")
            if direction not in directions(board, self.side):
                game.metrics["not_allowed"] = 1
                break
            board = add_tile(move_tiles(board, direction, self.side), rng)
        game.metrics |= {"won": int(max(board) >= self.goal), "best_tile": max(board)}
        game.reward = NOT_ALLOWED if game.metrics["not_allowed"] else self.reward(board)
        return game

    def beginning(self, seed):
        """A board some moves into a game that is played at random; its tiles are half the goal together."""
        rng = random.Random(f"beginning {seed}")
        board = add_tile(add_tile([0] * self.side**2, rng), rng)
        while sum(board) < self.goal // 2 and directions(board, self.side):
            board = add_tile(move_tiles(board, rng.choice(directions(board, self.side)), self.side), rng)
        return board if directions(board, self.side) else self.beginning(f"{seed}, again")

    def reward(self, board):
        """2 for a game won; else how near its best tile and all together come, by their logarithms."""
        if max(board) >= self.goal:
            return WIN
        best = (math.log2(max(board)) - 1) / (math.log2(self.goal) - 1)
        total = (math.log2(sum(board)) - 1) / (math.log2(self.goal * self.side**2) - 1)
        return best * 0.5 + total * 0.5


def format_board(board, side):
    """The rows, a dot where nothing stands, and below them the directions in which something moves."""
    cells = [f" {it or '.'}" for it in board]
    rows = ["".join(cells[at : at + side]) for at in range(0, side * side, side)]
    return "\n".join([*rows, "".join(f" {direction}" for direction in directions(board, side))])


def move_tiles(board, direction, side):
    """The board after all tiles moved that way: two equal ones that meet are one of twice the number."""
    across = direction in ("up", "down")
    rows = [board[at : at + side] for at in range(0, side * side, side)]
    rows = [list(it) for it in zip(*rows, strict=True)] if across else rows
    rows = [push_row(it[::-1])[::-1] if direction in ("right", "down") else push_row(it) for it in rows]
    rows = [list(it) for it in zip(*rows, strict=True)] if across else rows
    return [it for row in rows for it in row]


def push_row(row):
    """A row whose tiles are pushed to its beginning."""
    tiles, found = [it for it in row if it], []
    while tiles:
        tile = tiles.pop(0)
        found.append(tile + tiles.pop(0) if tiles and tiles[0] == tile else tile)
    return found + [0] * (len(row) - len(found))


def directions(board, side):
    """The ways in which something moves."""
    return [direction for direction in DIRECTIONS if move_tiles(board, direction, side) != board]


def add_tile(board, rng):
    """The board with a new tile: a 2, one time in ten a 4."""
    place = rng.choice([at for at, it in enumerate(board) if not it])
    return [*board[:place], 2 if rng.random() < 0.9 else 4, *board[place + 1 :]]


if __name__ == "__main__":
    main()
