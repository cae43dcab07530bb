"""A smolagents program as its users write it, in rollouts of a run. Prints one JSON object.

    LAUNCH_BASE_URL=… LAUNCH_API_KEY=… python smolagents_shop.py STEPS

Its ToolCallingAgent asks a price list; each rollout has a model at its own address.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from launcher.client import connect, group

PRICES = {"lamp": "12", "chair": "25", "table": "48", "bottle": "3", "shirt": "18", "guitar": "50"}
ROLLOUTS = 8
run = connect()


@tool
def price_of(item: str) -> str:
    """Returns the price of an item in euros.

    Args:
        item: the item
    """
    return PRICES.get(item, "not found")


def ask(item: str) -> tuple[str, str, int]:
    """The rollout's id, the agent's answer, and how many calls of the price list it made."""
    rollout = run.new_rollout()
    model = OpenAIServerModel(
        model_id=run.model, api_base=run.rollout_url(rollout), api_key=run.api_key, temperature=1.0
    )
    agent = ToolCallingAgent([price_of], model, max_steps=4, verbosity_level=0)
    answer = agent.run(f"What does the {item} cost?")
    steps: Any = agent.memory.steps
    calls = [call.name for step in steps for call in getattr(step, "tool_calls", None) or ()]
    return rollout, str(answer), calls.count("price_of")


def main(steps: int) -> None:
    said = []
    for _ in range(steps):
        items = [item for item in PRICES for _ in range(ROLLOUTS)]
        with ThreadPoolExecutor(16) as pool:
            found = [*pool.map(ask, items)]
        rewards = [
            float(answer.strip() == PRICES[it]) for it, (_, answer, _) in zip(items, found, strict=True)
        ]
        groups = []
        for at, item in enumerate(PRICES):
            mine = slice(at * ROLLOUTS, (at + 1) * ROLLOUTS)
            ids = [rollout for rollout, _, _ in found[mine]]
            groups.append(group(item, dict(zip(ids, rewards[mine], strict=True))))
        counts = run.step(groups).counts.model_dump()
        right, called = sum(rewards) / len(rewards), sum(bool(calls) for _, _, calls in found) / len(found)
        said.append({"right": right, "called": called, "counts": counts})
    print(json.dumps({"steps": said}))


main(int(sys.argv[1]))
