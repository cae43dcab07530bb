"""A pydantic-ai program as its users write it, in rollouts of its run. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from launcher.client import connect, group
from launcher.client.tracing import Rollout

ROLLOUTS = 4
run = connect()
provider = OpenAIProvider(base_url=run.base_url, api_key=run.api_key)
adder = Agent(OpenAIChatModel(run.model, provider=provider), instructions="Add what you are given.")


@adder.tool_plain
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


async def roll_out(number: int) -> Rollout:
    async with run.rollout() as rollout:
        result = await adder.run(f"pydantic_ai {number}: what is the sum?")
    rollout.reward = number % 2 if result.output else 0.0
    return rollout


async def main() -> None:
    rollouts = await asyncio.gather(*(roll_out(number) for number in range(ROLLOUTS)))
    status = run.step([group("sums", rollouts)])
    said = {
        "rollouts": [it.id for it in rollouts],
        "requests": [it.requests for it in rollouts],
        "astray": run.astray,
        "counts": status.counts.model_dump(),
    }
    print(json.dumps(said))


asyncio.run(main())
