"""What the embedded agent model learns from: prompts as DSPy writes them, answers that DSPy reads."""

from __future__ import annotations

import json
import random
from typing import Any

import dspy
import pytest

from examples.tiny_agent import prompts, proposals, tasks, tool_prompts

ROWS = 30


def answers(row: prompts.Conversation) -> list[dict[str, Any]]:
    return [it for it in row["messages"] if it.get("trained")]


def adapter_of(row: prompts.Conversation) -> dspy.Adapter:
    return prompts.ADAPTERS[row["kind"].split("/")[1]]


def test_each_answer_to_a_task_has_the_fields_that_its_prompt_asks_for() -> None:
    rng = random.Random(1)
    for _ in range(ROWS):
        task = tasks.any_task(rng)
        for row in prompts.dspy_conversations(rng, task):
            (answer,) = answers(row)
            reasoned = (
                "reasoning" in answer["content"].split("\n", 2)[1] + answer["content"].split("\n", 1)[0]
            )
            found: Any = adapter_of(row).parse(prompts.signature_of(task, reasoned), answer["content"])
            assert {it.name for it in task.outputs} <= {*found}


@pytest.mark.parametrize("made", ["label_task", "extraction_task", "question_task", "sum_task"])
def test_the_answer_is_right_as_often_as_the_prompt_helps(made: str) -> None:
    rng = random.Random(2)
    task = getattr(tasks, made)(rng)
    while not task.told or tasks.is_careful(task.instruction):
        task = getattr(tasks, made)(rng)

    def share(examples: int, reasoned: bool) -> float:
        cases = [task.draw(rng) for _ in range(400)]
        given = [prompts.answered(rng, task, it, examples, reasoned) for it in cases]
        right = [it.outputs.items() <= found.items() for it, found in zip(cases, given, strict=True)]
        return sum(right) / len(right)

    alone, shown, thought = share(0, False), share(3, False), share(3, True)
    assert prompts.ACCURACY_BY_HELP[0] - 0.08 < alone < shown < thought


def test_a_step_of_react_names_one_of_its_tools_and_its_arguments() -> None:
    rng = random.Random(3)
    for _ in range(ROWS // 4):
        for row in tool_prompts.react_conversations(rng):
            (answer,) = answers(row)
            if not row["kind"].startswith("react/"):
                continue
            signature: Any = dspy.Signature(
                "question -> next_thought, next_tool_name, next_tool_args: dict[str, Any]"
            )
            found: Any = adapter_of(row).parse(signature, answer["content"])
            system = row["messages"][0]["content"]
            assert f") {found['next_tool_name']}, whose description" in system
            assert isinstance(found["next_tool_args"], dict)


def test_a_call_has_the_arguments_that_the_tool_requires() -> None:
    rng = random.Random(4)
    called = 0
    for _ in range(ROWS):
        for row in (tool_prompts.chat_conversation(rng), tool_prompts.native_conversation(rng)):
            functions = {it["function"]["name"]: it["function"] for it in row["tools"] or []}
            for message in answers(row):
                for call in message.get("tool_calls", []):
                    called += 1
                    function = call["function"]
                    assert [*function["arguments"]] == functions[function["name"]]["parameters"]["required"]
    assert called > ROWS


def test_an_optimisers_question_gets_its_fields_and_many_different_instructions() -> None:
    rng = random.Random(5)
    proposed = set[str]()
    for _ in range(ROWS):
        for made in (proposals.mipro_conversation, proposals.simba_conversation, proposals.gepa_conversation):
            row = made(rng)
            (answer,) = answers(row)
            if "proposed_instruction" in answer["content"]:
                proposed.add(answer["content"])
            if made is proposals.gepa_conversation:
                assert json.loads(answer["content"])["new_instruction"]
    assert len(proposed) > ROWS // 6
