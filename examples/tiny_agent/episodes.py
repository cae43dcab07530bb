"""Questions that are answered with a tool: a calculator, look-ups, and tools beside them that are not needed.

Neighbours: `tasks.py` has the sums, `words.toml` what is looked up; `tool_prompts.py` and
`smolagents_prompts.py` write the episodes as the frameworks do. Knows nothing of prompts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from examples.tiny_agent import words
from examples.tiny_agent.tasks import any_sum
from examples.tiny_agent.words import LOOKUPS

# How often the model reaches for the tool at once, rather than guess: training has something to win.
CALL_RATE = 0.97
# How often a look-up finds nothing, and the model says so.
NOT_FOUND_RATE = 0.04


@dataclass(frozen=True)
class Tool:
    """A function as its caller describes it; `args` has a JSON type and a description for each argument."""

    name: str
    desc: str
    args: dict[str, tuple[str, str]]

    def as_function(self, described: bool) -> dict[str, Any]:
        """As in `tools` of a chat request."""
        properties = {
            name: {"type": kind} | ({"description": desc} if described and desc else {})
            for name, (kind, desc) in self.args.items()
        }
        parameters = {"type": "object", "properties": properties, "required": [*self.args]}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.desc, "parameters": parameters},
        }


@dataclass(frozen=True)
class Call:
    """A call, why it is made, and what comes back."""

    tool: Tool
    arguments: dict[str, Any]
    thought: str
    observation: str


@dataclass(frozen=True)
class Episode:
    """A question, the calls that answer it, and the answer."""

    question: str
    calls: list[Call]
    answer: str
    sentence: str
    """The answer in a sentence."""
    guess: str
    others: list[Tool] = field(default_factory=list)

    def tools(self, rng: random.Random) -> list[Tool]:
        """All that may be called, in any order."""
        found = {it.tool.name: it.tool for it in self.calls} | {
            it.name: it for it in self.others if it.name not in {call.tool.name for call in self.calls}
        }
        listed = [*found.values()]
        rng.shuffle(listed)
        return listed


CALCULATORS = ("calculator", "calculate", "calc", "compute", "evaluate", "math", "evaluate_math", "solve")
EXPRESSIONS = ("expression", "formula", "query", "input", "text", "expr")
SUM_DESCS = (
    "Computes an expression.",
    "Evaluate a mathematical expression.",
    "Calculates the result of an expression such as 3 + 4.",
    "A calculator.",
    "Does arithmetic.",
    "Compute the value of an arithmetic expression and return it.",
    "Useful for sums.",
    "Calculator for numbers.",
)


def calculator(rng: random.Random) -> Tool:
    """A calculator of an expression."""
    name = rng.choice(CALCULATORS)
    return Tool(
        name,
        rng.choice(SUM_DESCS),
        {rng.choice(EXPRESSIONS): ("string", rng.choice(("", "for example 3 + 4")))},
    )


_ANY_LOOKUP = (
    "lookup",
    "look_up",
    "search",
    "find",
    "query",
    "retrieve",
    "get",
    "search_database",
    "get_info",
    "directory",
)
_ANY_DESCS = (
    "Looks up a fact.",
    "Search the database.",
    "Finds what is known about a name.",
    "Search for information.",
    "Returns a fact on what it is asked for.",
    "Look something up.",
)


def lookup_tool(rng: random.Random, kind: str) -> Tool:
    """A tool that finds this kind of thing; a third of them find anything."""
    lookup = LOOKUPS[kind]
    if rng.random() < 0.33:
        return Tool(
            rng.choice(_ANY_LOOKUP),
            rng.choice(_ANY_DESCS + lookup.descs),
            {rng.choice((*lookup.args, "query", "key", "term")): ("string", "")},
        )
    name = rng.choice(lookup.names) if rng.random() < 0.7 else rng.choice(_ANY_LOOKUP)
    desc = rng.choice(lookup.descs)
    return Tool(name, desc, {rng.choice(lookup.args): ("string", rng.choice(("", "", "what to look for")))})


def any_episode(rng: random.Random) -> Episode:
    """One question of any kind, with tools beside that it does not need."""
    kind = rng.choices(("sum", "lookup", "pair", "both"), (38, 45, 9, 8))[0]
    makers = {"sum": _sum_episode, "lookup": _lookup_episode, "pair": _pair_episode, "both": _both_episode}
    made = makers[kind](rng)
    others: list[Tool] = []
    for _ in range(rng.choices((0, 1, 2), (4, 5, 1))[0]):
        others.append(calculator(rng) if kind != "sum" and rng.random() < 0.5 else _unneeded(rng, made))
    return Episode(made.question, made.calls, made.answer, made.sentence, made.guess, others)


def _unneeded(rng: random.Random, made: Episode) -> Tool:
    """A look-up of another kind than those called."""
    used = {it.tool.desc for it in made.calls}
    while True:
        lookup = LOOKUPS[rng.choice([*LOOKUPS])]
        if not used & {*lookup.descs}:
            return Tool(
                rng.choice(lookup.names), rng.choice(lookup.descs), {rng.choice(lookup.args): ("string", "")}
            )


def _sum_episode(rng: random.Random) -> Episode:
    it = any_sum(rng, rng.choice((12, 20, 99, 500)))
    tool = calculator(rng)
    call = Call(
        tool,
        {next(iter(tool.args)): it.expression},
        rng.choice(("I need to compute {}.", "I compute {} with the tool.", "The sum is {}.")).format(
            it.expression
        ),
        str(it.result),
    )
    guess = str(max(0, it.result + rng.choice((-3, -2, -1, 1, 2, 10))))
    return Episode(it.question, [call], str(it.result), f"The answer is {it.result}.", guess)


def _pair_episode(rng: random.Random) -> Episode:
    """A tool with two numbers."""
    sign, names, desc = rng.choice(
        (
            (
                "+",
                ("add", "plus", "sum_numbers", "add_numbers"),
                ("Adds two numbers.", "Returns the sum of a and b."),
            ),
            (
                "*",
                ("multiply", "times", "product"),
                ("Multiplies two numbers.", "Returns the product of a and b."),
            ),
            ("-", ("subtract", "minus", "difference"), ("Subtracts b from a.", "Returns a minus b.")),
        )
    )
    while True:
        it = any_sum(rng, rng.choice((12, 20, 99)))
        if f" {sign} " in it.expression:
            break
    a, b = it.expression.split(f" {sign} ")
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))
    kind = rng.choice(("integer", "integer", "number"))
    tool = Tool(rng.choice(names), rng.choice(desc), {first: (kind, ""), second: (kind, "")})
    call = Call(tool, {first: int(a), second: int(b)}, f"I need to compute {it.expression}.", str(it.result))
    return Episode(
        it.question,
        [call],
        str(it.result),
        f"The answer is {it.result}.",
        str(it.result + rng.choice((-2, -1, 1, 2))),
    )


def _lookup_episode(rng: random.Random) -> Episode:
    kind = rng.choice([*LOOKUPS])
    lookup, tool = LOOKUPS[kind], lookup_tool(rng, kind)
    key, value = rng.choice(lookup.keys), rng.choice(lookup.values)
    sentence = lookup.sentence.format(key=key, value=value)
    missing = rng.random() < NOT_FOUND_RATE
    observation = "not found" if missing else rng.choice((value, value, sentence, json.dumps({kind: value})))
    thought = rng.choice(("I look up {}.", "I need to look up {}.", "I search for {}.")).format(key)
    call = Call(tool, {next(iter(tool.args)): key}, thought, observation)
    question = rng.choice(lookup.questions).format(key=key)
    if missing:
        return Episode(question, [call], "unknown", "I could not find it.", rng.choice(lookup.values))
    return Episode(question, [call], value, sentence, rng.choice(lookup.values))


def _both_episode(rng: random.Random) -> Episode:
    """A price to look up, then a product of it."""
    lookup, tool, sums = LOOKUPS["price"], lookup_tool(rng, "price"), calculator(rng)
    key, price, count = rng.choice(lookup.keys), rng.randint(2, 50), rng.randint(2, 9)
    total = price * count
    number = rng.choice((str(count), words.in_words(count)))
    question = rng.choice(
        ("What do {n} {key}s cost?", "How much are {n} {key}s?", "I buy {n} {key}s. How much is it?")
    ).format(n=number, key=key)
    found = rng.choice((str(price), f"The {key} costs {price} euros."))
    calls = [
        Call(tool, {next(iter(tool.args)): key}, f"I look up {key}.", found),
        Call(
            sums,
            {next(iter(sums.args)): f"{count} * {price}"},
            f"I need to compute {count} * {price}.",
            str(total),
        ),
    ]
    return Episode(
        question, calls, str(total), f"They cost {total} euros.", str(total + rng.choice((-2, 1, 3, 10)))
    )
