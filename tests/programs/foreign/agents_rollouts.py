"""An OpenAI Agents SDK program as its users write it, in rollouts of its run. Prints one JSON object.

The tool is `@function_tool` as it comes, with `strict: true`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx2
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
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
adder = Agent(
    name="adder",
    instructions="Add what you are given.",
    tools=[add],
    model=OpenAIChatCompletionsModel(model=run.model, openai_client=client),
)


async def roll_out(number: int) -> Rollout:
    async with run.rollout() as rollout:
        await Runner.run(adder, f"agents {number}: what is the sum?")
    rollout.reward = float(number % 2)  # whatever a tiny model says, there is something to learn
    return rollout


async def main() -> None:
    theirs = httpx2.AsyncClient._send_single_request
    rollouts = await asyncio.gather(*(roll_out(number) for number in range(ROLLOUTS)))
    status = run.step([group("sums", rollouts)])
    said = {
        "strict": all(getattr(tool, "strict_json_schema", False) for tool in adder.tools),
        "rollouts": [it.id for it in rollouts],
        "requests": [it.requests for it in rollouts],
        "samples": [it.samples for it in rollouts],
        "astray": run.astray,
        "untouched": httpx2.AsyncClient._send_single_request is theirs,
        "counts": status.counts.model_dump(),
        "unwanted": sorted({"runtime", "sky", "dspy", "typer", "aiohttp"} & set(sys.modules)),
    }
    print(json.dumps(said))


asyncio.run(main())
