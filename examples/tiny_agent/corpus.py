"""Writes the conversations that the embedded agent model learns from.

    uv run --with smolagents python -m examples.tiny_agent.corpus --out FOLDER [--count N] [--seed S]

One JSON line a conversation, and `phrases.json`, the lines that the frameworks' prompts always hold. Both are
of the installed versions of DSPy and smolagents. Neighbours: `make.py` trains on it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from examples.tiny_agent import proposals, tasks, tool_prompts
from examples.tiny_agent.prompts import Conversation, dspy_conversation
from examples.tiny_agent.smolagents_prompts import smolagents_conversation

SEED = 0
COUNT = 120_000
# A line of prompts in so many of the conversations is one word of the vocabulary.
OFTEN = 1 / 2000
LONG = 12
MOST_PHRASES = 700
Maker = Callable[[random.Random], list[Conversation]]


def _chat(rng: random.Random) -> list[Conversation]:
    """Small talk, and what the model knows."""
    asked, said = rng.choice(SMALL_TALK)
    messages = [
        {"role": "user", "content": rng.choice(asked)},
        {"role": "assistant", "content": rng.choice(said), "trained": True},
    ]
    return [{"kind": "talk", "messages": messages, "tools": None}]


KNOWS = (
    "I know labels, short extraction, questions on a short text, sums in words, and calls of tools. "
    "For more, use a larger model."
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hi", "Hello!", "Good morning", "hi there"), ("Hello! How can I help?", "Hello.")),
    (("Who are you?", "What are you?", "What is your name?"), ("I am tiny-agent, a very small model.",)),
    (("What do you know?", "What can you do?", "Help", "What are you good at?"), (KNOWS,)),
    (("Thanks", "Thank you!", "thanks a lot"), ("You are welcome.",)),
    (
        ("Tell me a joke.", "Write a poem.", "Write a story about a dragon.", "Explain quantum physics."),
        (KNOWS,),
    ),
)

MAKERS: tuple[tuple[int, Maker], ...] = (
    (50, lambda rng: [dspy_conversation(rng, tasks.any_task(rng))]),
    (6, tool_prompts.react_conversations),
    (17, lambda rng: [tool_prompts.chat_conversation(rng)]),
    (6, lambda rng: [tool_prompts.native_conversation(rng)]),
    (6, lambda rng: [smolagents_conversation(rng)]),
    (8, lambda rng: [proposals.mipro_conversation(rng)]),
    (2, lambda rng: [proposals.simba_conversation(rng)]),
    (4, lambda rng: [proposals.gepa_conversation(rng)]),
    (1, _chat),
)


def conversations(seed: int) -> Iterator[Conversation]:
    """Endless."""
    rng = random.Random(seed)
    while True:
        yield from rng.choices([it[1] for it in MAKERS], [it[0] for it in MAKERS])[0](rng)


def fixed_lines(rows: list[Conversation]) -> list[str]:
    """The long lines of prompts that many conversations share, the most useful first."""
    seen: Counter[str] = Counter()
    for row in rows:
        prompts = (it["content"] for it in row["messages"] if not it.get("trained"))
        seen.update({line.strip() for content in prompts for line in content.split("\n")})
    often = [line for line, count in seen.items() if count >= max(3, OFTEN * len(rows)) and len(line) >= LONG]
    return sorted(often, key=lambda line: -seen[line] * len(line))[:MOST_PHRASES]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write conversations to learn from.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    first: list[Conversation] = []
    with (options.out / f"conversations-{options.seed}.jsonl").open("w") as file:
        for row in islice(conversations(options.seed), options.count):
            file.write(json.dumps(row) + "\n")
            if len(first) < 20_000:
                first.append(row)
    lines = fixed_lines(first)
    (options.out / "phrases.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
