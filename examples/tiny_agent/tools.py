"""Questions that are answered with a tool: a calculator, look-ups, and tools beside them that are not needed.

As DSPy's ReAct writes them, and as `tools` of a chat request. Neighbours: `tasks.py` has the sums and
people, `smolagents_prompts.py` writes the episodes as smolagents does, `corpus.py` mixes the conversations.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.signatures.signature import make_signature

from examples.tiny_agent import words
from examples.tiny_agent.prompts import ADAPTERS, Conversation, any_adapter
from examples.tiny_agent.tasks import CAREFUL, NEUTRAL, any_sum

Rng = random.Random

# How often the model reaches for the tool at once, rather than guess: training has something to win.
CALLS = 0.88
# How often a look-up finds nothing, and the model says so.
MISSING = 0.04


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

    def tools(self, rng: Rng) -> list[Tool]:
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


def calculator(rng: Rng) -> Tool:
    """A calculator of an expression."""
    name = rng.choice(CALCULATORS)
    return Tool(
        name,
        rng.choice(SUM_DESCS),
        {rng.choice(EXPRESSIONS): ("string", rng.choice(("", "for example 3 + 4")))},
    )


@dataclass(frozen=True)
class Book:
    """A thing to look up: tools for it, and questions and sentences on it."""

    names: tuple[str, ...]
    args: tuple[str, ...]
    descs: tuple[str, ...]
    questions: tuple[str, ...]
    sentence: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


_NUMBERS = tuple(map(str, range(2, 100)))
_PHONES = tuple(str(it) for it in range(1200, 9990, 37))
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

BOOKS: dict[str, Book] = {
    "city": Book(
        ("get_city", "find_city", "lookup_city", "where_lives", "town_of"),
        ("name", "person", "who", "query"),
        (
            "Finds the city of a person.",
            "Returns the town where a person lives.",
            "Look up where someone lives.",
        ),
        (
            "Where does {key} live?",
            "In which city does {key} live?",
            "What is the city of {key}?",
            "Find the town of {key}.",
        ),
        "{key} lives in {value}.",
        words.NAMES,
        words.CITIES,
    ),
    "job": Book(
        ("get_job", "find_job", "lookup_job", "profession_of"),
        ("name", "person", "who", "query"),
        ("Finds the job of a person.", "Returns what a person works as.", "Look up someone's profession."),
        (
            "What does {key} do?",
            "What is the job of {key}?",
            "What does {key} work as?",
            "Find the profession of {key}.",
        ),
        "{key} is a {value}.",
        words.NAMES,
        words.JOBS,
    ),
    "phone": Book(
        ("get_phone", "phone_book", "lookup_phone", "find_number"),
        ("name", "person", "who", "query"),
        ("Finds the phone number of a person.", "Look up a phone number.", "A phone book."),
        ("What is the phone number of {key}?", "How can I call {key}?", "Find the number of {key}."),
        "The number of {key} is {value}.",
        words.NAMES,
        _PHONES,
    ),
    "price": Book(
        ("get_price", "lookup_price", "price_of", "find_price", "price_list"),
        ("item", "product", "name", "article", "query"),
        ("Returns the price of an item.", "Finds what a product costs.", "Look up a price in euros."),
        ("What does the {key} cost?", "How much is the {key}?", "What is the price of the {key}?"),
        "The {key} costs {value} euros.",
        words.PRODUCTS,
        _NUMBERS,
    ),
    "stock": Book(
        ("get_stock", "check_stock", "inventory", "count_items"),
        ("item", "product", "name", "query"),
        (
            "Returns how many of an item are in stock.",
            "Counts an item in the warehouse.",
            "Look up the stock.",
        ),
        (
            "How many {key}s are in stock?",
            "How many of the {key} do we have?",
            "What is the stock of the {key}?",
        ),
        "There are {value} of the {key}.",
        words.PRODUCTS,
        _NUMBERS,
    ),
    "weather": Book(
        ("get_weather", "weather", "forecast", "weather_in"),
        ("city", "place", "location", "town"),
        (
            "Returns the weather of a city.",
            "Get the current weather for a location.",
            "Finds the weather of a place.",
        ),
        ("What is the weather in {key}?", "How is the weather in {key}?", "Tell me the weather of {key}."),
        "The weather in {key} is {value}.",
        words.CITIES,
        ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "stormy", "dry"),
    ),
    "capital": Book(
        ("get_capital", "capital_of", "lookup_capital"),
        ("country", "nation", "name"),
        ("Returns the capital of a country.", "Finds a country's capital.", "Look up a capital."),
        (
            "What is the capital of {key}?",
            "Which city is the capital of {key}?",
            "Name the capital of {key}.",
        ),
        "The capital of {key} is {value}.",
        words.COUNTRIES,
        words.CITIES,
    ),
    "day": Book(
        ("get_opening_day", "calendar", "find_date", "lookup_day"),
        ("event", "name", "title", "query"),
        ("Returns the day of an event.", "Finds when something takes place.", "Look up the calendar."),
        ("When is the {key}?", "On which day is the {key}?", "What day is the {key}?"),
        "The {key} is on {value}.",
        ("concert", "exam", "meeting", "party", "match", "lesson", "market", "wedding", "dinner", "race"),
        words.DAYS,
    ),
}
_ANY_DESCS = (
    "Looks up a fact.",
    "Search the database.",
    "Finds what is known about a name.",
    "Search for information.",
    "Returns a fact on what it is asked for.",
    "Look something up.",
)


def book_tool(rng: Rng, kind: str) -> Tool:
    """A tool that finds this kind of thing; a third of them find anything."""
    book = BOOKS[kind]
    if rng.random() < 0.33:
        return Tool(
            rng.choice(_ANY_LOOKUP),
            rng.choice(_ANY_DESCS + book.descs),
            {rng.choice((*book.args, "query", "key", "term")): ("string", "")},
        )
    name = rng.choice(book.names) if rng.random() < 0.7 else rng.choice(_ANY_LOOKUP)
    desc = rng.choice(book.descs)
    return Tool(name, desc, {rng.choice(book.args): ("string", rng.choice(("", "", "what to look for")))})


def any_episode(rng: Rng) -> Episode:
    """One question of any kind, with tools beside that it does not need."""
    kind = rng.choices(("sum", "book", "pair", "both"), (38, 45, 9, 8))[0]
    made = {"sum": _sum_episode, "book": _book_episode, "pair": _pair_episode, "both": _both_episode}[kind](
        rng
    )
    others: list[Tool] = []
    for _ in range(rng.choices((0, 1, 2), (4, 5, 1))[0]):
        others.append(calculator(rng) if kind != "sum" and rng.random() < 0.5 else _unneeded(rng, made))
    return Episode(made.question, made.calls, made.answer, made.sentence, made.guess, others)


def _unneeded(rng: Rng, made: Episode) -> Tool:
    """A look-up of another kind than those called."""
    used = {it.tool.desc for it in made.calls}
    while True:
        book = BOOKS[rng.choice([*BOOKS])]
        if not used & {*book.descs}:
            return Tool(
                rng.choice(book.names), rng.choice(book.descs), {rng.choice(book.args): ("string", "")}
            )


def _sum_episode(rng: Rng) -> Episode:
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


def _pair_episode(rng: Rng) -> Episode:
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


def _book_episode(rng: Rng) -> Episode:
    kind = rng.choice([*BOOKS])
    book, tool = BOOKS[kind], book_tool(rng, kind)
    key, value = rng.choice(book.keys), rng.choice(book.values)
    sentence = book.sentence.format(key=key, value=value)
    missing = rng.random() < MISSING
    observation = "not found" if missing else rng.choice((value, value, sentence, json.dumps({kind: value})))
    thought = rng.choice(("I look up {}.", "I need to look up {}.", "I search for {}.")).format(key)
    call = Call(tool, {next(iter(tool.args)): key}, thought, observation)
    question = rng.choice(book.questions).format(key=key)
    if missing:
        return Episode(question, [call], "unknown", "I could not find it.", rng.choice(book.values))
    return Episode(question, [call], value, sentence, rng.choice(book.values))


def _both_episode(rng: Rng) -> Episode:
    """A price to look up, then a product of it."""
    book, tool, sums = BOOKS["price"], book_tool(rng, "price"), calculator(rng)
    key, price, count = rng.choice(book.keys), rng.randint(2, 50), rng.randint(2, 9)
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


# --- as DSPy's ReAct

_QUESTION_NAMES = ("question", "question", "question", "query", "task", "request", "problem", "user_request")
_ANSWER_NAMES = ("answer", "answer", "answer", "result", "response", "reply", "output")


def react_conversations(rng: Rng) -> list[Conversation]:
    """The calls of an episode of `dspy.ReAct`, in two formats: choose a tool, finish, extract the answer."""
    episode = any_episode(rng)
    asked, target = rng.choice(_QUESTION_NAMES), rng.choice(_ANSWER_NAMES)
    instruction = rng.choice(_REACT_INSTRUCTIONS + CAREFUL[:2] + NEUTRAL[:2])
    tools: list[Any] = [_dspy_tool(it) for it in episode.tools(rng)]
    signature: Any = make_signature(f"{asked} -> {target}", instruction or None)
    react = dspy.ReAct(signature, tools=tools)
    names = rng.sample([*ADAPTERS], 2)
    return [row for name in names for row in _react_rows(rng, react, episode, (asked, target), name)]


_REACT_INSTRUCTIONS = (
    "",
    "",
    "",
    "",
    "Answer the question.",
    "Use the tools to answer.",
    "Answer with the help of the tools.",
)


def _react_rows(
    rng: Rng, react: dspy.ReAct, episode: Episode, names: tuple[str, str], adapter_name: str
) -> list[Conversation]:
    asked, target = names
    adapter = ADAPTERS[adapter_name]
    trajectory: dict[str, Any] = {}
    rows: list[Conversation] = []

    def row(kind: str, signature: Any, outputs: dict[str, Any]) -> None:
        with dspy.context(adapter=adapter):
            told = react._format_trajectory(trajectory)
        inputs = {asked: episode.question, "trajectory": told}
        messages: list[dict[str, Any]] = adapter.format(signature, [], inputs)
        content = adapter.format_assistant_message_content(signature, outputs)
        messages.append({"role": "assistant", "content": content, "trained": True})
        rows.append({"kind": f"{kind}/{adapter_name}", "messages": messages, "tools": None})

    def step(thought: str, tool: str, arguments: dict[str, Any], observation: str) -> None:
        chosen = {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}
        row("react", react.react.signature, chosen)
        number = len(trajectory) // 4
        names = (f"{it}_{number}" for it in ("thought", "tool_name", "tool_args", "observation"))
        trajectory.update(zip(names, (thought, tool, arguments, observation), strict=True))

    guessing = rng.random() > CALLS
    answer = episode.guess if guessing else episode.answer
    for call in [] if guessing else episode.calls:
        step(call.thought, call.tool.name, call.arguments, call.observation)
    known = rng.choice((f"I know it: {answer}.", f"The answer is {answer}."))
    step("I think that I know it." if guessing else known, "finish", {}, "Completed.")
    row(
        "react_answer",
        react.extract.predict.signature,
        {"reasoning": f"The answer is {answer}.", target: answer},
    )
    return rows


def _dspy_tool(tool: Tool) -> dspy.Tool:
    args = {name: {"type": kind} for name, (kind, _) in tool.args.items()}
    return dspy.Tool(lambda **_: "", name=tool.name, desc=tool.desc, args=args)


def native_conversation(rng: Rng) -> Conversation:
    """DSPy's call with `use_native_function_calling`: the adapter's prompt without outputs, and `tools`."""
    name, adapter = any_adapter(rng)
    episode = any_episode(rng)
    asked = rng.choice(_QUESTION_NAMES)
    instruction = rng.choice(
        ("Answer the question.", "Use the tools to answer.", "Call the right tool.", "Answer.")
    )
    signature: Any = make_signature({asked: (str, dspy.InputField())}, instruction)
    messages: list[dict[str, Any]] = adapter.format(signature, [], {asked: episode.question})
    call = episode.calls[0]
    messages.append(called(call.tool.name, call.arguments))
    tools = [it.as_function(described=False) for it in episode.tools(rng)]
    return {"kind": f"native/{name}", "messages": messages, "tools": tools}


# --- as `tools` of a chat request

_SYSTEMS = (
    "",
    "",
    "You are a helpful assistant.",
    "You are a helpful agent.",
    "Use the tools to answer.",
    "Answer with the help of your tools.",
    "You can call tools. Answer briefly.",
    "You are a shop assistant.",
    "Call a tool when you need a fact or a number.",
)


def chat_conversation(rng: Rng) -> Conversation:
    """One or two questions, each answered by calls of tools; now and then a guess without."""
    episodes = [any_episode(rng) for _ in range(rng.choices((1, 2), (8, 2))[0])]
    tools: dict[str, Tool] = {}
    for episode in episodes:
        for it in episode.tools(rng):
            if it.name in tools and tools[it.name] != it:
                return chat_conversation(rng)
            tools[it.name] = it
    system = rng.choice(_SYSTEMS)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    in_sentences = rng.random() < 0.35
    for episode in episodes:
        messages.append({"role": "user", "content": episode.question})
        if rng.random() > CALLS:
            messages.append({"role": "assistant", "content": episode.guess, "trained": True})
            continue
        for call in episode.calls:
            messages.append(called(call.tool.name, call.arguments))
            messages.append({"role": "tool", "content": call.observation})
        content = episode.sentence if in_sentences else episode.answer
        messages.append({"role": "assistant", "content": content, "trained": True})
    described = rng.random() < 0.6
    return {
        "kind": "tools/native",
        "messages": messages,
        "tools": [it.as_function(described) for it in tools.values()],
    }


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], "trained": True}
