"""Temporal Clue: who was where, and when, worked out from clues; the reward is the share of right answers.

    launch --gpus H100 --model Qwen/Qwen2.5-7B-Instruct -- python temporal_clue.py
    launch -- python temporal_clue.py --offline

Cost and duration: offline $0.00 and a minute on 2 busy cores; rented about $10 and three hours on one H100
(estimated).

The puzzles are made here, by a seed: of several guests each was in another place at another time, the clues
allow one solution and none of them can be left out. How to reason is shown nowhere; a group is 16 tries of
one puzzle. Rented it has 4 guests and 6 questions a puzzle, 8 puzzles a step, 100 steps.

Offline the tiny model cannot reason. It speaks a little French, so the guests are a king, a queen and a
brother, and an answer is read as the first guest, place and moon that it names. It begins by naming hardly
any and learns to name one of each, which is right as often as a guess is: one in three. The loop is the same.

Offline 15 steps brought the share of right answers to 64 held-out puzzles from 0.10 to 0.21, 0.30 and 0.30,
for three seeds. Rented it has not been run. Figure to beat: none is published for the 7B notebook of ART
that this follows. In the work behind it (Qwen2.5 14B and 32B, OpenPipe, 2025-03-06) the trained models pass
o1, o3-mini and R1 and end a couple of points below Claude Sonnet 3.7.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import string
from dataclasses import dataclass
from statistics import fmean, stdev

from openai import AsyncOpenAI

from launcher.client import Trajectory, TrajectoryGroup, connect, gather_ahead, gather_trajectory_groups

KINDS = ("who", "where", "when")


@dataclass(frozen=True)
class World:
    """The words of a puzzle: for each kind its names, with a pattern of an answer's words for each."""

    who: dict[str, str]
    where: dict[str, str]
    when: dict[str, str]  # in their order

    def name_of(self, kind, number):
        return [*getattr(self, kind)][number]

    def named(self, kind, text):
        """The names of a kind that a text has, in the order in which it has them."""
        found = [
            (match.start(), number)
            for number, pattern in enumerate(getattr(self, kind).values())
            if (match := re.search(rf"\b(?:{pattern})", text, re.IGNORECASE))
        ]
        return [number for _, number in sorted(found)]


HOUSE = World(
    {name: rf"{name}\b" for name in ("Ada", "Boris", "Clara", "Dmitri")},
    {f"in the {name}": rf"{name}\b" for name in ("kitchen", "library", "cellar", "attic")},
    {
        "at eight": r"(?:eight|8)\b",
        "at nine": r"(?:nine|9)\b",
        "at ten": r"(?:ten|10)\b",
        "at eleven": r"(?:eleven|11)\b",
    },
)
# In words that the tiny model knows; it answers in French, and both genders of a colour will do.
MOONLIGHT = World(
    {"the king": "roi", "the queen": "reine", "the brother": "frère"},
    {"in the house": "maison", "in the garden": "jardin", "on the bridge": "pont"},
    {
        "under the black moon": "noir",
        "under the white moon": "blan",
        "under the green moon": "vert",
    },
)


@dataclass(frozen=True)
class Clue:
    """A sentence about two numbers: of guests, places or times, as its kind has it."""

    kind: str
    one: int
    other: int

    def holds(self, where, when):
        """Whether the clue holds if guest g was in place where[g] at time when[g]."""
        one, other = self.one, self.other
        match self.kind:
            case "not at":
                return where[one] != other
            case "not came":
                return when[one] != other
            case "place's time":
                return when[where.index(one)] == other
            case "before":
                return when[one] < when[other]
            case _:  # "place before": the guest in that place came before the other
                return when[where.index(one)] < when[other]

    def text(self, world):
        one, other = self.one, self.other
        match self.kind:
            case "not at":
                return f"{world.name_of('who', one)} was not {world.name_of('where', other)}."
            case "not came":
                return f"{world.name_of('who', one)} did not come {world.name_of('when', other)}."
            case "place's time":
                return f"Whoever was {world.name_of('where', one)} came {world.name_of('when', other)}."
            case "before":
                return f"{world.name_of('who', one)} came before {world.name_of('who', other)}."
            case _:
                return f"Whoever was {world.name_of('where', one)} came before {world.name_of('who', other)}."


# They always suffice; no clue names the guest in the kitchen outright.
CLUES = ("not at", "not came", "place's time", "before", "place before")


@dataclass(frozen=True)
class Question:
    """The kind that is asked for (`kind`), for a name of another kind, and the number of the right name."""

    kind: str
    about: tuple[str, int]
    answer: int

    def text(self, world):
        about = world.name_of(*self.about)
        match self.kind, self.about[0]:
            case "when", "who":
                return f"When did {about} come?"
            case "where", "who":
                return f"Where was {about}?"
            case "who", "where":
                return f"Who was {about}?"
            case "when", _:
                return f"When did whoever was {about} come?"
            case "who", _:
                return f"Who came {about}?"
            case _:
                return f"Where was whoever came {about}?"


@dataclass(frozen=True)
class Puzzle:
    world: World
    clues: tuple[Clue, ...]
    questions: tuple[Question, ...]


def solutions(size):
    """All there could be: each guest's place, and each guest's time."""
    return list(itertools.product(itertools.permutations(range(size)), repeat=2))


def make_puzzle(rng, world, question_count):
    """A puzzle of one solution, none of whose clues is needless, with so many questions."""
    size = len(world.who)
    remaining = solutions(size)
    where, when = rng.choice(remaining)
    pairs = itertools.product(CLUES, range(size), range(size))
    true_clues = [clue for clue in (Clue(*it) for it in pairs) if clue.holds(where, when)]
    rng.shuffle(true_clues)
    clues = []
    for clue in true_clues:
        allowed = [it for it in remaining if clue.holds(*it)]
        if len(allowed) < len(remaining):
            clues.append(clue)
            remaining = allowed
    for clue in list(clues):
        others = [it for it in clues if it != clue]
        if sum(all(it.holds(*found) for it in others) for found in solutions(size)) == 1:
            clues = others
    rng.shuffle(clues)
    return Puzzle(world, tuple(clues), tuple(questions_of(rng, where, when, question_count)))


def questions_of(rng, where, when, count):
    """Different questions; each kind in its turn."""
    found = []
    for number in range(len(where)):
        names = {"who": number, "where": where[number], "when": when[number]}
        found += [
            Question(kind, (other, names[other]), names[kind])
            for kind, other in itertools.permutations(KINDS, 2)
        ]
    rng.shuffle(found)
    by_kind = [[it for it in found if it.kind == kind] for kind in KINDS]
    return [by_kind[number % 3][number // 3] for number in range(count)]


def prompt(puzzle):
    world = puzzle.world
    clues = [clue.text(world) for clue in puzzle.clues]
    questions = [it.text(world) for it in puzzle.questions]
    if world is MOONLIGHT:  # as the tiny model is shown its fields
        return "[[ ## english ## ]]\n" + " ".join([*clues, *questions]).lower()
    lines = [f"{letter}. {it}" for letter, it in zip(string.ascii_uppercase, questions, strict=False)]
    return "\n".join(
        [
            "Guests came to a house. Each was in another place, and each came at another time.",
            *(f"{kind.capitalize()}: {', '.join(getattr(world, kind))}." for kind in KINDS),
            "",
            *(f"- {clue[0].upper()}{clue[1:]}" for clue in clues),
            "",
            *lines,
            "",
            "Think first. Then write one line for each question: its letter and the name, as in `A. Ada`.",
        ]
    )


# In one line, and with nothing to try twice: a policy may well write a thousand empty ones.
MARKS = r"[^\w\n]"
LINE = rf"^{MARKS}*(?:(?:answer|question){MARKS}+)?{{letter}}(?={MARKS}*[.):]){MARKS}+(\w.*)$"


def parse_answers(text, puzzle):
    """A text's answer to each question: a number, or None if it names nothing, or several names.

    Of lines that begin with a question's letter, with any decoration, the last one counts. If no line does
    and each question is of another kind, the first name of its kind in the text does.
    """
    world, questions = puzzle.world, puzzle.questions
    lines = [
        re.findall(LINE.format(letter=letter), text, re.MULTILINE | re.IGNORECASE)
        for letter in string.ascii_uppercase[: len(questions)]
    ]
    if any(lines):
        named = [
            world.named(it.kind, found[-1]) if found else []
            for it, found in zip(questions, lines, strict=True)
        ]
        return [it[0] if len(it) == 1 else None for it in named]
    if len({it.kind for it in questions}) < len(questions):
        return [None] * len(questions)
    return [next(iter(world.named(it.kind, text)), None) for it in questions]


def share_right(text, puzzle):
    right = [
        answer == it.answer for answer, it in zip(parse_answers(text, puzzle), puzzle.questions, strict=True)
    ]
    return sum(right) / len(right)


async def rollout(client, model, puzzle, tokens, temperature=1.0):
    trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": prompt(puzzle)}])
    response = await client.chat.completions.create(
        model=model, messages=trajectory.messages(), max_tokens=tokens, temperature=temperature
    )
    choice = response.choices[0]
    trajectory.messages_and_choices.append(choice)
    text = choice.message.content or ""
    trajectory.reward = share_right(text, puzzle)
    trajectory.metrics["answered"] = fmean(it is not None for it in parse_answers(text, puzzle))
    return trajectory.finish()


def rewards_of(groups):
    return [one.reward for group in groups for one in group if one.reward is not None]


async def main() -> None:
    parser = argparse.ArgumentParser(description="Temporal Clue: who was where, and when.")
    parser.add_argument("--offline", action="store_true", help="small puzzles, on the tiny model")
    parser.add_argument("--steps", type=int, help="default: 100, or 15 with --offline")
    parser.add_argument("--puzzles", type=int, default=8, help="in each step; default: 8")
    parser.add_argument("--tries", type=int, default=16, help="of each puzzle; default: 16")
    parser.add_argument("--held-out", type=int, default=64, help="puzzles to judge with; default: 64")
    parser.add_argument("--staleness", type=int, default=0, help="steps rolled out ahead; default: 0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    world, question_count, tokens = (MOONLIGHT, 3, 40) if args.offline else (HOUSE, 6, 2048)
    steps = args.steps or (15 if args.offline else 100)
    run = connect()
    client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)

    rng = random.Random("held out")
    held_out = [make_puzzle(rng, world, question_count) for _ in range(args.held_out)]

    async def score(label, model=run.model, step=None):
        """Score the held-out puzzles, one answer each, as a validation of the run."""
        tries = [TrajectoryGroup([rollout(client, model, it, tokens, temperature=0.0)]) for it in held_out]
        groups = await gather_trajectory_groups(tries, pbar_desc=f"held out, {label}")
        run.log(groups, step=step)
        return rewards_of(groups)

    results_file = run.run_dir / "temporal_clue.json" if run.run_dir else None
    place = run.read_state().get("temporal_clue")
    if place and place["steps"] >= steps and results_file and results_file.exists():
        print(f"this training had finished before: {results_file} stays as it is")
        return
    before = await score("before", "base", step=0)  # after a resume, too

    def puzzle_groups():
        """One puzzle after the other; begun again, the same ones."""
        for number in itertools.count():
            rng = random.Random(f"{args.seed} {number}")
            for puzzle in [make_puzzle(rng, world, question_count) for _ in range(args.puzzles)]:
                yield TrajectoryGroup(rollout(client, run.model, puzzle, tokens) for _ in range(args.tries))

    counts, rewards = {"trained": 0, "dropped": 0}, []
    async for groups in gather_ahead(
        run,
        puzzle_groups(),
        per_step=args.puzzles,
        steps=steps,
        staleness=args.staleness,
        place=place,
        max_exceptions=0.1,
    ):
        result = await run.train_async(groups, state={"temporal_clue": groups.place})
        run.log(groups, split="train", metrics=result.metrics, step=result.step)
        rewards.append(fmean(rewards_of(groups)))
        counts["trained"] += result.trained
        counts["dropped"] += sum(result.dropped.values())
        print(f"step {groups.place['steps']}/{steps}: reward {rewards[-1]:.3f}, trained {result.trained}")
    after = await score("after")

    rises = [new - old for old, new in zip(before, after, strict=True)]
    error = stdev(rises) / len(rises) ** 0.5
    scores = f"{fmean(before):.3f} → {fmean(after):.3f} over {len(rises)}"
    print(f"held-out: {scores}: {fmean(rises):+.3f} ± {error:.3f}")
    if results_file:
        found = {"before": fmean(before), "after": fmean(after), "error": error, "rewards": rewards, **counts}
        results_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
