"""An OpenAI Agents SDK program with a price list, in rollouts of a run. Prints one JSON object.

LAUNCH_BASE_URL=… LAUNCH_API_KEY=… python agents_shop.py STEPS
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from launcher.client import connect, group
from launcher.client.tracing import Rollout

PRICES = {"lamp": "12", "chair": "25", "table": "48", "bottle": "3", "shirt": "18", "guitar": "50"}
ROLLOUTS = 8
run = connect()
set_tracing_disabled(True)


@function_tool
def price_of(item: str) -> str:
    """Returns the price of an item in euros."""
    return PRICES.get(item, "not found")


client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)
model = OpenAIChatCompletionsModel(model=run.model, openai_client=client)
agent = Agent(name="shop", instructions="Answer with the price.", tools=[price_of], model=model)


async def ask(item: str) -> tuple[Rollout, bool]:
    """The rollout, with its reward, and whether the price list was asked."""
    answer, called = "", False
    async with run.rollout() as rollout:
        try:
            done = await Runner.run(agent, f"What does the {item} cost?", max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError):  # a call of a tool that there is not
            pass
        else:
            answer = str(done.final_output)
            called = any(it.type == "tool_call_item" for it in done.new_items)
    rollout.reward = float(PRICES[item] in answer)
    return rollout, called


async def main(steps: int) -> None:
    said = []
    for _ in range(steps):
        items = [item for item in PRICES for _ in range(ROLLOUTS)]
        found = await asyncio.gather(*map(ask, items))
        groups = [
            group(item, [rollout for of, (rollout, _) in zip(items, found, strict=True) if of == item])
            for item in PRICES
        ]
        counts = run.step(groups).counts.model_dump()
        right = sum(float(rollout.reward or 0) for rollout, _ in found) / len(found)
        said.append(
            {"right": right, "called": sum(called for _, called in found) / len(found), "counts": counts}
        )
    print(json.dumps({"steps": said}))


asyncio.run(main(int(sys.argv[1])))
