"""An agent of the OpenAI Agents SDK whose tools an MCP server has, in rollouts of its run. Prints JSON.

One server for all rollouts, in a process of its own, by chat and by the Responses API.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.mcp import MCPServer, MCPServerStdio
from openai import AsyncOpenAI

from launcher.client import connect
from launcher.client.tracing import Rollout
from tests.support import foreign_report

ROLLOUTS = 4
ADDER = Path(__file__).with_name("mcp_adder.py")
run = connect()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)
MODELS: dict[str, Any] = {
    "mcp": OpenAIChatCompletionsModel(model=run.model, openai_client=client),
    "mcp_responses": OpenAIResponsesModel(model=run.model, openai_client=client),
}


async def roll_out(server: MCPServer, form: str, number: int) -> Rollout:
    adder = Agent(
        name="adder", instructions="Add what you are given.", mcp_servers=[server], model=MODELS[form]
    )
    async with run.rollout() as rollout:
        await Runner.run(adder, f"{form} {number}: what is the sum?")
    rollout.reward = float(number % 2)
    return rollout


async def trained(server: MCPServer, form: str) -> dict[str, Any]:
    rollouts = await asyncio.gather(*(roll_out(server, form, number) for number in range(ROLLOUTS)))
    return foreign_report.trained(run, rollouts)


async def main() -> None:
    params: Any = {"command": sys.executable, "args": [str(ADDER)]}
    async with MCPServerStdio(params, client_session_timeout_seconds=60) as server:
        print(json.dumps({form: await trained(server, form) for form in MODELS}))


asyncio.run(main())
