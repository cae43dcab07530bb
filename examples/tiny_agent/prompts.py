"""Writes a task as DSPy does: Chat, JSON and XML adapter, examples before the question, a reasoning first.

Neighbours: `tasks.py` has the tasks, `corpus.py` mixes the conversations made here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import dspy
from dspy.signatures.signature import make_signature

from examples.tiny_agent.tasks import Case, Field, Task

ADAPTERS: dict[str, dspy.Adapter] = {
    "chat": dspy.ChatAdapter(),
    "json": dspy.JSONAdapter(),
    "xml": dspy.XMLAdapter(),
}
SHARES = {"chat": 45, "json": 25, "xml": 30}

# Examples in a prompt. Each answer in it is learned, too: twelve cost little more than one.
DEMOS = (0, 4, 8, 12, 12)
# What the labels mean can be known after so many, where the prompt does not say it.
SHOWN = 4


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


def dspy_conversation(rng: random.Random, task: Task) -> Conversation:
    """A call of a program for this task, with or without examples."""
    reasoned = rng.random() < 0.15
    signature = signature_of(task, reasoned)
    count = rng.choice(DEMOS) if task.told else max(DEMOS)
    demos = [_answered(task.draw(rng), reasoned) for _ in range(count)]
    case = task.draw(rng)
    outputs = typed(task, _outputs(case, reasoned))
    made = conversation_of(task.kind, any_adapter(rng), signature, case.inputs, outputs, demos)
    answers = [it for it in made["messages"] if it["role"] == "assistant"]
    for message in answers if task.told else answers[SHOWN:]:
        message["trained"] = True
    return made


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


def _answered(case: Case, reasoned: bool) -> dict[str, str]:
    return {**case.inputs, **_outputs(case, reasoned)}


def _outputs(case: Case, reasoned: bool) -> dict[str, str]:
    return {**({"reasoning": case.reasoning} if reasoned else {}), **case.outputs}


def typed(task: Task, outputs: dict[str, str]) -> dict[str, Any]:
    """Numbers as numbers, which JSON writes without quotes."""
    numbers = {it.name for it in task.outputs if it.number}
    return {name: int(it) if name in numbers and it.isdigit() else it for name, it in outputs.items()}
