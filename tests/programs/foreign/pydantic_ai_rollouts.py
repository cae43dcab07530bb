"""A pydantic-ai program as its users write it, in rollouts of its run, by three APIs, streamed and not.

Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from launcher.client import connect
from launcher.client.tracing import Rollout
from tests.support import foreign_report

ROLLOUTS = 4
run = connect()
openai = OpenAIProvider(base_url=run.base_url, api_key=run.api_key)
anthropic = AnthropicProvider(base_url=run.base_url.removesuffix("/v1"), api_key=run.api_key)
MODELS: dict[str, Any] = {
    "pydantic_ai": OpenAIChatModel(run.model, provider=openai),
    "responses_ai": OpenAIResponsesModel(run.model, provider=openai),
    "anthropic_ai": AnthropicModel(run.model, provider=anthropic),
}
MODELS |= {f"{form}_stream": model for form, model in MODELS.items()}


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


async def read(_: Any, events: AsyncIterable[Any]) -> None:
    """With a reader of its events an agent asks for streams."""
    async for _ in events:
        pass


async def roll_out(form: str, number: int) -> Rollout:
    adder = Agent(MODELS[form], instructions="Add what you are given.", tools=[add])
    question = f"{form} {number}: what is the sum?"
    async with run.rollout() as rollout:
        result = await adder.run(question, event_stream_handler=read if form.endswith("_stream") else None)
    rollout.reward = number % 2 if result.output else 0.0
    return rollout


async def trained(form: str) -> dict[str, Any]:
    rollouts = await asyncio.gather(*(roll_out(form, number) for number in range(ROLLOUTS)))
    return foreign_report.trained(run, rollouts)


async def main() -> None:
    print(json.dumps({form: await trained(form) for form in MODELS}))


asyncio.run(main())
