"""Writes a task as DSPy does: Chat, JSON and XML adapter, examples before the question, a reasoning first.

Neighbours: `tasks.py` has the tasks, `corpus.py` mixes the conversations made here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import dspy
from dspy.signatures.signature import make_signature

from examples.tiny_agent.tasks import Case, Field, Task, is_careful

ADAPTERS: dict[str, dspy.Adapter] = {
    "chat": dspy.ChatAdapter(),
    "json": dspy.JSONAdapter(),
    "xml": dspy.XMLAdapter(),
}
SHARES = {"chat": 45, "json": 25, "xml": 30}

# How often an answer is right by the number of helps in the prompt: examples, an instruction to be careful, a
# reasoning first. The rest are guesses: demonstrations, instructions and training have something to win.
ACCURACY_BY_HELP = (0.62, 0.84, 0.94, 0.94)
MOST_DEMOS = 8


class Conversation(TypedDict):
    """One row of the corpus. The model learns the messages of the assistant that are marked `trained`."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def any_adapter(rng: random.Random) -> str:
    """The name of one of `ADAPTERS`."""
    return rng.choices([*SHARES], [*SHARES.values()])[0]


def annotation(field: Field) -> Any:
    """The type that a program gives the field."""
    if field.choices:
        return Literal[field.choices]  # pyrefly: ignore[invalid-literal] - made while running
    return int if field.number else str


def signature_of(task: Task, reasoned: bool) -> Any:
    """DSPy's signature, as `dspy.ChainOfThought` has it if it is reasoned."""

    def described(field: Field) -> dict[str, str]:
        return {"desc": field.desc} if field.desc else {}

    fields: dict[str, Any] = {it.name: (str, dspy.InputField(**described(it))) for it in task.inputs}
    if reasoned:
        fields["reasoning"] = (str, dspy.OutputField())
    fields |= {it.name: (annotation(it), dspy.OutputField(**described(it))) for it in task.outputs}
    return make_signature(fields, task.instruction or None)


def dspy_conversations(rng: random.Random, task: Task) -> list[Conversation]:
    """Three calls of a program for this task, with or without examples."""
    reasoned = rng.random() < 0.25
    signature = signature_of(task, reasoned)
    return [_conversation(rng, task, signature, reasoned) for _ in range(3)]


def _conversation(rng: random.Random, task: Task, signature: Any, reasoned: bool) -> Conversation:
    name = any_adapter(rng)
    count = 0 if rng.random() < 0.5 else min(MOST_DEMOS, 1 + int(rng.expovariate(0.45)))
    if not task.told and rng.random() < 0.8:
        count = max(count, 3)
    cases = [task.draw(rng) for _ in range(count)]
    bare = reasoned and rng.random() < 0.5
    demos = [_demo(it, reasoned and not bare) for it in cases]
    case = task.draw(rng)
    outputs = typed(task, answered(rng, task, case, count, reasoned))
    return conversation_of(task.kind, name, signature, case.inputs, outputs, demos)


def conversation_of(
    kind: str,
    adapter_name: str,
    signature: Any,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    demos: Sequence[dict[str, Any]] = (),
) -> Conversation:
    """One call of a DSPy program and its answer, as this adapter writes them."""
    adapter = ADAPTERS[adapter_name]
    messages: list[dict[str, Any]] = adapter.format(signature, [*demos], inputs)
    content = adapter.format_assistant_message_content(signature, outputs)
    messages.append({"role": "assistant", "content": content, "trained": True})
    return {"kind": f"{kind}/{adapter_name}", "messages": messages, "tools": None}


def _demo(case: Case, reasoned: bool) -> dict[str, str]:
    reasoning = {"reasoning": case.reasoning} if reasoned else {}
    return {**case.inputs, **reasoning, **case.outputs}


def typed(task: Task, outputs: dict[str, str]) -> dict[str, Any]:
    """Numbers as numbers, which JSON writes without quotes."""
    numbers = {it.name for it in task.outputs if it.number}
    return {name: int(it) if name in numbers and it.isdigit() else it for name, it in outputs.items()}


def answered(rng: random.Random, task: Task, case: Case, examples: int, reasoned: bool) -> dict[str, str]:
    """What the model is taught to say: right as often as the prompt helps, else a guess."""
    helped = (examples >= 2) + is_careful(task.instruction) + reasoned
    accuracy = ACCURACY_BY_HELP[helped]
    if not task.told and examples == 0:
        accuracy = 0.0
    if rng.random() < accuracy:
        found, reasoning = case.outputs, case.reasoning
    else:
        found = {name: rng.choice(case.guesses[name]) for name in case.outputs}
        reasoning = case.reasoning
        for name, value in case.outputs.items():
            reasoning = reasoning.replace(value, found[name])
    return ({"reasoning": reasoning} if reasoned else {}) | found
