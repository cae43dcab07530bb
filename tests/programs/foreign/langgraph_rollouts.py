"""LangGraph ReAct agents as their users write them, in rollouts of their run. Prints one JSON object.

"url": each rollout has a `ChatOpenAI` of its own at its address. "block": one for all, in the rollouts'
blocks. "forgetful": the same with other instructions at every turn, so that no turn goes on from the last.
"responses_api": one for all by the Responses API. "graph" and "graph_api": the same two, streamed.
"""

from __future__ import annotations

import itertools
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from launcher.client import connect
from tests.support import foreign_report

warnings.simplefilter("ignore")  # the agent's maker has moved to another package, and says so
ROLLOUTS = 4
INSTRUCTIONS = "Add what you are given."
run = connect()
turns = itertools.count()


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def other_each_time(state: Any) -> list[Any]:
    return [("system", f"Turn {next(turns)}. {INSTRUCTIONS}"), *state["messages"]]


def agent_at(base_url: str, prompt: Any = INSTRUCTIONS, **settings: Any) -> Any:
    model = ChatOpenAI(model=run.model, base_url=base_url, api_key=run.api_key, **settings)  # type: ignore[arg-type]
    return create_react_agent(model, [add], prompt=prompt)


def ask(agent: Any, form: str, number: int) -> str:
    question = {"messages": [("user", f"{form} {number}: what is the sum?")]}
    if form.startswith("graph"):
        return str([part.content for part, _ in agent.stream(question, stream_mode="messages")])
    return agent.invoke(question)["messages"][-1].content


agents = {
    "block": agent_at(run.base_url),
    "forgetful": agent_at(run.base_url, other_each_time),
    "responses_api": agent_at(run.base_url, use_responses_api=True),
    "graph": agent_at(run.base_url),
    "graph_api": agent_at(run.base_url, use_responses_api=True),
}


def roll_out(form: str, number: int) -> Any:
    rollout = run.rollout()
    if form == "url":
        said = ask(agent_at(rollout.base_url), form, number)
    else:
        with rollout:
            said = ask(agents[form], form, number)
    rollout.reward = number % 2 if said else 0.0
    return rollout


def trained(form: str) -> dict[str, Any]:
    with ThreadPoolExecutor(ROLLOUTS) as pool:
        rollouts = list(pool.map(roll_out, [form] * ROLLOUTS, range(ROLLOUTS)))
    return foreign_report.trained(run, rollouts)


print(json.dumps({form: trained(form) for form in ("url", *agents)}))
