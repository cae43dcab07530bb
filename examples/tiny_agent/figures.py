"""What the embedded agent model does before any training, measured through the product.

    launch --model FOLDER -- python -m examples.tiny_agent.figures --model FOLDER

Greedy answers: DSPy's three formats, programs written by hand, `dspy.ReAct`, and tools of a chat request.
Neighbours: `optimizers.py` runs DSPy's prompt optimisers, `make.py` makes the model.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
from openai import OpenAI

from examples.tiny_agent import tasks, words
from examples.tiny_agent.programs import PROGRAMS, is_right
from examples.tiny_agent.prompts import signature_of
from launcher.client import PolicyLM, connect, evaluate

ADAPTERS: dict[str, Callable[[], dspy.Adapter]] = {
    "chat": lambda: dspy.ChatAdapter(use_json_adapter_fallback=False),
    "json": dspy.JSONAdapter,
    "xml": lambda: dspy.XMLAdapter(use_json_adapter_fallback=False),
}
TASKS, CASES = 25, 4
AGENT_TASKS = 50
MOST_TURNS = 4
MOST_TOKENS = 256

# --- the tools, as a user writes them

_people, _things = random.Random("people"), random.Random("things")
PHONES = {name: str(_people.randint(1000, 9999)) for name in words.NAMES[:30]}
PRICES = {item: str(_things.randint(2, 99)) for item in words.PRODUCTS[:30]}
_SIGNS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculator(expression: str) -> str:
    """Computes an expression such as 3 + 4."""
    match ast.parse(expression, mode="eval").body:
        case ast.BinOp(ast.Constant(int(a)), sign, ast.Constant(int(b))) if type(sign) in _SIGNS:
            return str(_SIGNS[type(sign)](a, b))
    raise ValueError(f"not a sum of two numbers: {expression}")


def phone_book(name: str) -> str:
    """Finds the phone number of a person."""
    return PHONES.get(name, "not found")


def price_of(item: str) -> str:
    """Returns the price of an item in euros."""
    return PRICES.get(item, "not found")


TOOLS = {it.__name__: it for it in (calculator, phone_book, price_of)}


def agent_examples() -> list[dspy.Example]:
    """Sums and look-ups in turn."""
    rng = random.Random("agent")
    made = []
    for number in range(AGENT_TASKS):
        if number % 2:
            it = tasks.any_sum(rng, 50)
            made.append((it.question, str(it.result)))
        elif number % 4:
            name = rng.choice([*PHONES])
            made.append((f"What is the phone number of {name}?", PHONES[name]))
        else:
            item = rng.choice([*PRICES])
            made.append((f"What does the {item} cost?", PRICES[item]))
    return [dspy.Example(question=it, answer=answer).with_inputs("question") for it, answer in made]


# --- the measures


def _evaluated(program: dspy.Module, examples: list[dspy.Example], metric: Any, adapter: dspy.Adapter) -> Any:
    program.set_lm(PolicyLM(connect(), max_tokens=MOST_TOKENS))
    return evaluate(program, examples, metric, adapter=adapter)


def formats() -> dict[str, dict[str, float]]:
    """Draws of the model's own tasks, in each format: the share that parses, and that is right."""
    found = {}
    for name, adapter in ADAPTERS.items():
        rng, parsed, right = random.Random("formats"), 0.0, 0.0
        for _ in range(TASKS):
            task = tasks.any_task(rng)
            while not task.told:
                task = tasks.any_task(rng)
            cases = [task.draw(rng) for _ in range(CASES)]
            examples = [dspy.Example(**it.inputs, **it.outputs).with_inputs(*it.inputs) for it in cases]
            seen = _evaluated(dspy.Predict(signature_of(task, False)), examples, is_right, adapter())
            parsed, right = parsed + seen.parse_rate / TASKS, right + seen.score / TASKS
        found[name] = {"parsed": round(parsed, 3), "right": round(right, 3)}
    return found


def hand_written() -> dict[str, dict[str, dict[str, float]]]:
    """The programs that are written by hand, in each format."""
    found: dict[str, Any] = {}
    for name, it in PROGRAMS.items():
        for adapter_name, adapter in ADAPTERS.items():
            seen = _evaluated(dspy.Predict(it.signature), it.examples(), is_right, adapter())
            figures = {"parsed": round(seen.parse_rate, 3), "right": round(seen.score, 3)}
            found.setdefault(name, {})[adapter_name] = figures
    return found


def react() -> dict[str, dict[str, float]]:
    """`dspy.ReAct` on three tools: the share that calls one, and that is right."""
    found = {}
    for name, adapter in ADAPTERS.items():
        called = CalledTools()
        signature: Any = "question -> answer"
        program = dspy.ReAct(signature, tools=[*TOOLS.values()], max_iters=MOST_TURNS)
        seen = _evaluated(program, agent_examples(), called, adapter())
        figures = {"parsed": seen.parse_rate, "called": called.count / AGENT_TASKS, "right": seen.score}
        found[name] = {it: round(value, 3) for it, value in figures.items()}
    return found


class CalledTools:
    """A metric that counts the answers for which a tool was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> bool:
        names = (prediction.trajectory.get(f"tool_name_{turn}") for turn in range(MOST_TURNS))
        self.count += any(it in TOOLS for it in names)
        return is_right(example, prediction)


def chat_tools() -> dict[str, float]:
    """The same tools in `tools` of a chat request, in a loop of OpenAI's SDK."""
    run = connect()
    client: Any = OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
    called = right = 0
    for example in agent_examples():
        messages: list[Any] = [{"role": "user", "content": example.question}]
        for turn in range(MOST_TURNS):
            answer = client.chat.completions.create(
                model=run.model,
                messages=messages,
                tools=[_as_function(it) for it in TOOLS],
                temperature=0.0,
                max_tokens=MOST_TOKENS,
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                right += example.answer in (message.content or "")
                break
            called += turn == 0
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": it.id, "content": _result(it)} for it in message.tool_calls
            ]
    return {"called": called / AGENT_TASKS, "right": right / AGENT_TASKS}


def _as_function(name: str) -> dict[str, Any]:
    tool = TOOLS[name]
    (argument,) = (it for it in tool.__annotations__ if it != "return")
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": tool.__doc__, "parameters": parameters}
    return {"type": "function", "function": function}


def _result(call: Any) -> str:
    try:
        return TOOLS[call.function.name](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        return f"error: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the embedded agent model.")
    parser.add_argument("--model", type=Path, required=True, help="its folder, whose FIGURES.json is written")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "weights": hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest()
    }
    for measure in (chat_tools, react, formats, hand_written):
        found[measure.__name__] = measure()
        print(measure.__name__, json.dumps(found[measure.__name__]), flush=True)
    out = options.model / "FIGURES.json"
    before = json.loads(out.read_text()) if out.is_file() else {}
    out.write_text(json.dumps(before | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
