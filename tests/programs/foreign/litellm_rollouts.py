"""LiteLLM in rollouts of a run, by the Responses API and by Anthropic's. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import litellm

from launcher.client import connect
from launcher.client.tracing import Rollout
from tests.support import foreign_report

ROLLOUTS = 4
run = connect()
SCHEMA = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
    "required": ["first", "second"],
}
Turns = list[Any]


def add(arguments: dict[str, int]) -> str:
    return str(arguments["first"] + arguments["second"])


async def by_responses(turns: Turns, stream: bool = False) -> bool:
    """One turn; whether another follows."""
    answer: Any = await litellm.aresponses(
        model=f"openai/{run.model}", api_base=run.base_url, api_key=run.api_key, input=turns,
        instructions="Add what you are given.", stream=stream,
        tools=[{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}],
    )  # fmt: skip
    if stream:
        events = [event async for event in answer]
        answer = events[-1].response
    items = [item if isinstance(item, dict) else item.model_dump() for item in answer.output]
    calls = [item for item in items if item["type"] == "function_call"]
    turns += items
    turns += [
        {
            "type": "function_call_output",
            "call_id": it["call_id"],
            "output": add(json.loads(it["arguments"])),
        }
        for it in calls
    ]
    return bool(calls)


async def by_messages(turns: Turns) -> bool:
    """The same."""
    answer: Any = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{run.model}", api_base=run.base_url.removesuffix("/v1"), api_key=run.api_key,
        messages=turns, max_tokens=100, system="Add what you are given.",
        tools=[{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}],
    )  # fmt: skip
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    turns.append({"role": "assistant", "content": answer["content"]})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": add(block["input"])} for block in calls
    ]
    if results:
        turns.append({"role": "user", "content": results})
    return bool(calls)


FORMS = {
    "litellm_responses": by_responses,
    "litellm_messages": by_messages,
    "litellm_stream": partial(by_responses, stream=True),
}


async def roll_out(form: str, number: int) -> Rollout:
    turns: Turns = [{"role": "user", "content": f"{form} {number}: what is the sum?"}]
    async with run.rollout() as rollout:
        while await FORMS[form](turns):
            pass
    rollout.reward = float(number % 2)
    return rollout


async def trained(form: str) -> dict[str, Any]:
    rollouts = await asyncio.gather(*(roll_out(form, number) for number in range(ROLLOUTS)))
    return foreign_report.trained(run, rollouts)


async def main() -> None:
    print(json.dumps({form: await trained(form) for form in FORMS}))


asyncio.run(main())
