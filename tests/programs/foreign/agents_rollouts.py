"""OpenAI Agents SDK programs as their users write them, in rollouts of a run. Prints one JSON object.

The tool is `@function_tool` as it comes, with `strict: true`. One agent calls as it likes, another calls one
tool after the other; a third uses the Responses API, which the SDK does by itself, and a fourth goes on there
by `previous_response_id`. Two stream, by either API.

    LAUNCH_BASE_URL=… LAUNCH_API_KEY=… python agents_rollouts.py [AGENT …]
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import httpx2
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from launcher.client import connect, group
from launcher.client.tracing import Rollout

ROLLOUTS = 4
run = connect()
set_tracing_disabled(True)


@function_tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)
model = OpenAIChatCompletionsModel(model=run.model, openai_client=client)
instructions = "Add what you are given."
responses = OpenAIResponsesModel(model=run.model, openai_client=client)
one_call = ModelSettings(parallel_tool_calls=False)
AGENTS = {
    "agents": Agent(name="adder", instructions=instructions, tools=[add], model=model),
    "one": Agent(name="adder", instructions=instructions, tools=[add], model=model, model_settings=one_call),
    "responses": Agent(name="adder", instructions=instructions, tools=[add], model=responses),
    "stored": Agent(name="adder", instructions=instructions, tools=[add], model=responses),
    "streamed": Agent(name="adder", instructions=instructions, tools=[add], model=model),
    "streamed_responses": Agent(name="adder", instructions=instructions, tools=[add], model=responses),
}


async def roll_out(name: str, number: int) -> tuple[Rollout, list[int]]:
    """A rollout, and how many calls each answer made that its agent was given."""
    async with run.rollout() as rollout:
        question, stored = f"{name} {number}: what is the sum?", name == "stored"
        if name.startswith("streamed"):
            done: Any = Runner.run_streamed(AGENTS[name], question)
            async for _ in done.stream_events():
                pass
        else:
            done = await answered(Runner.run(AGENTS[name], question, auto_previous_response_id=stored))
    rollout.reward = float(number % 2)  # whatever a tiny model says, there is something to learn
    answers = done.raw_responses if done is not None else []
    return rollout, [sum(it.type == "function_call" for it in answer.output) for answer in answers]


async def answered(run: Awaitable[Any]) -> Any:
    """None where the model did not come to an end, which the SDK takes for an error of it on this API."""
    try:
        return await run
    except ModelBehaviorError as error:
        if "reason='max_output_tokens'" not in str(error):
            raise
        return None


async def trained(name: str) -> dict[str, Any]:
    found = await asyncio.gather(*(roll_out(name, number) for number in range(ROLLOUTS)))
    rollouts = [rollout for rollout, _ in found]
    return {
        "rollouts": [it.id for it in rollouts],
        "requests": [it.requests for it in rollouts],
        "samples": [it.samples for it in rollouts],
        "calls": [count for _, calls in found for count in calls],
        "counts": run.step([group("sums", rollouts)]).counts.model_dump(),
    }


async def main() -> None:
    theirs = httpx2.AsyncClient._send_single_request
    said = {name: await trained(name) for name in sys.argv[1:] or AGENTS} | {
        "strict": all(getattr(tool, "strict_json_schema", False) for tool in AGENTS["agents"].tools),
        "astray": run.astray,
        "untouched": httpx2.AsyncClient._send_single_request is theirs,
        "unwanted": sorted({"runtime", "sky", "dspy", "typer", "aiohttp"} & set(sys.modules)),
    }
    print(json.dumps(said))


asyncio.run(main())
