"""What the embedded agent model learns from: prompts as DSPy writes them, answers that DSPy reads."""

from __future__ import annotations

import dataclasses
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


def test_each_answer_to_a_task_is_right_and_has_the_fields_that_its_prompt_asks_for() -> None:
    rng = random.Random(1)
    untold = 0
    for _ in range(4 * ROWS):
        task = tasks.any_task(rng)
        row = prompts.dspy_conversation(rng, task)
        answered = [it for it in row["messages"] if it["role"] == "assistant"]
        learned = answers(row)
        assert learned == (answered if task.told else answered[prompts.SHOWN :])
        untold += not task.told
        reasoned = "reasoning" in row["messages"][0]["content"]
        for answer in learned:
            found: Any = adapter_of(row).parse(prompts.signature_of(task, reasoned), answer["content"])
            assert {it.name for it in task.outputs} <= {*found}
    assert untold


@pytest.mark.parametrize("made", ["label_task", "extraction_task", "question_task", "sum_task"])
def test_what_is_learned_is_the_right_answer(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    task = getattr(tasks, made)(rng)
    while not task.told:
        task = getattr(tasks, made)(rng)
    monkeypatch.setattr(prompts, "DEMOS", (3,))
    drawn = list[tasks.Case]()

    def draw(rng: random.Random) -> tasks.Case:
        drawn.append(task.draw(rng))
        return drawn[-1]

    row = prompts.dspy_conversation(rng, dataclasses.replace(task, draw=draw))
    *_, last = answers(row)
    assert len(drawn) == 4
    assert all(value in last["content"] for value in drawn[-1].outputs.values())


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
