"""Agents' frameworks train here as they are installed, each in an environment that our package is not in.

The engine is scripted, as the tiny model calls no tools; gateway and relay are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from tests.support.agent_world import AgentWorld
from tests.support.foreign_environments import AGENTS, LANGGRAPH, LITELLM, PYDANTIC_AI

pytestmark = pytest.mark.slow

# Two that call the tool, and one in words.
TURNS = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentWorld]:
    world = AgentWorld(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def check(world: AgentWorld, program: str, said: dict[str, Any]) -> dict[str, Any]:
    """What is trained of a program's rollouts is what the engine sampled for them; the step's counts."""
    counts, names = said["counts"], said["rollouts"]
    heard = world.heard(program)
    assert [len(heard[number]) for number in range(len(names))] == [TURNS] * len(names)
    rows = list(world.trained(set(names)))
    assert counts["trained"] == counts["samples"] == TURNS * len(names) > 0
    assert not counts["dropped"] and not counts["retokenised"]
    assert counts["turns_joined"] + counts["sealed"] == (TURNS - 1) * len(names)
    assert len(rows) == len(names) + counts["sealed"]
    for number, name in enumerate(names):
        mine = [row for row in rows if row.rollout == name]
        assert [*chain(*(row.sampled for row in mine))] == [*chain(*(it.ids for it in heard[number]))]
        logprobs = chain(*(row.logprobs for row in mine))
        assert [*logprobs] == [*chain(*(it.logprobs for it in heard[number]))]
        last = heard[number][-1]
        assert mine[-1].tokens == last.prompt + last.ids
    return counts


@pytest.fixture(scope="module")
def openai_agents(world: AgentWorld) -> dict[str, Any]:
    """What a program says of its two agents of the OpenAI Agents SDK, by how they call tools."""
    return world.said_by(AGENTS, "agents_rollouts.py")


def test_b04_openai_agents_with_function_tools_as_they_come_train_on_what_was_sampled(
    world: AgentWorld, openai_agents: dict[str, Any]
) -> None:
    said = openai_agents | openai_agents["agents"]
    # Of our own package nothing was there but the client, beside releases that its own extras do not allow.
    assert said["unwanted"] == []
    assert said["strict"] and said["untouched"] and said["astray"] == 0
    assert said["requests"] == [TURNS] * len(said["rollouts"])
    assert [len(names) for names in said["samples"]] == said["requests"]
    counts = check(world, "agents", said)
    assert counts["turns_joined"] == (TURNS - 1) * len(said["rollouts"]) and not counts["sealed"]
    tools = [tool["function"] for it in world.heard("agents")[0] for tool in it.asked["tools"]]
    assert len(tools) == TURNS and not any(tool.get("strict") for tool in tools)


def test_r01_openai_agents_that_call_one_tool_at_a_time_train_on_what_was_sampled(
    world: AgentWorld, openai_agents: dict[str, Any]
) -> None:
    said = openai_agents["one"]
    counts = check(world, "one", said)
    assert max(openai_agents["agents"]["calls"]) == 2 and set(said["calls"]) == {0, 1}
    # Whose answer made two calls has a prompt next that it does not begin.
    assert set(counts["sealed_by"]) <= {"calls after the first were left out"}
    heard = world.heard("one").values()
    assert not any("parallel_tool_calls" in it.asked for turns in heard for it in turns)


@pytest.mark.parametrize("form", ["responses", "stored", "streamed", "streamed_responses"])
def test_b04_openai_agents_by_the_responses_api_train_on_what_was_sampled(
    world: AgentWorld, openai_agents: dict[str, Any], form: str
) -> None:
    said = openai_agents[form]
    assert said["requests"] == [TURNS] * len(said["rollouts"])
    counts = check(world, form, said)
    assert counts["turns_joined"] == (TURNS - 1) * len(said["rollouts"]) and not counts["sealed"]


@pytest.fixture(scope="module")
def by_mcp(world: AgentWorld) -> dict[str, Any]:
    """What a program says whose agents have an MCP server's tools, by the API that they use."""
    return world.said_by(AGENTS, "mcp_rollouts.py")


@pytest.mark.parametrize("form", ["mcp", "mcp_responses"])
def test_b04_an_agent_with_the_tools_of_an_mcp_server_trains_on_what_was_sampled(
    world: AgentWorld, by_mcp: dict[str, Any], form: str
) -> None:
    said = by_mcp[form]
    assert said["requests"] == [TURNS] * len(said["rollouts"]) and said["astray"] == 0
    counts = check(world, form, said)
    assert counts["turns_joined"] == (TURNS - 1) * len(said["rollouts"]) and not counts["sealed"]
    for turns in world.heard(form).values():
        messages = turns[-1].asked["messages"]
        calls = {call["id"]: call for message in messages for call in message.get("tool_calls") or ()}
        results = {it["tool_call_id"]: it["content"] for it in messages if it["role"] == "tool"}
        assert calls.keys() == results.keys() and len(results) >= TURNS - 1
        for name, call in calls.items():
            said_by_tool = results[name]  # by chat, the SDK sends a list of texts
            text = said_by_tool if isinstance(said_by_tool, str) else said_by_tool[0]["text"]
            assert int(text) == sum(json.loads(call["function"]["arguments"]).values())


@pytest.fixture(scope="module")
def pydantic_ai(world: AgentWorld) -> dict[str, Any]:
    """What a pydantic-ai program says of its agents, by the API that they use."""
    return world.said_by(PYDANTIC_AI, "pydantic_ai_rollouts.py")


PYDANTICS = ["pydantic_ai", "responses_ai", "anthropic_ai"]


@pytest.mark.parametrize("form", [*PYDANTICS, *(f"{form}_stream" for form in PYDANTICS)])
def test_b04_pydantic_ai_as_it_is_installed_trains_by_each_api(
    world: AgentWorld, pydantic_ai: dict[str, Any], form: str
) -> None:
    said = pydantic_ai[form]
    assert said["requests"] == [TURNS] * len(said["rollouts"]) and said["astray"] == 0
    check(world, form, said)


@pytest.fixture(scope="module")
def by_litellm(world: AgentWorld) -> dict[str, Any]:
    """What a program says that asks by LiteLLM, by the API that it uses."""
    return world.said_by(LITELLM, "litellm_rollouts.py")


@pytest.mark.parametrize("form", ["litellm_responses", "litellm_messages", "litellm_stream"])
def test_b04_litellm_trains_by_the_apis_that_it_has_beside_chat(
    world: AgentWorld, by_litellm: dict[str, Any], form: str
) -> None:
    said = by_litellm[form]
    assert said["requests"] == [TURNS] * len(said["rollouts"]) and said["astray"] == 0
    counts = check(world, form, said)
    assert counts["turns_joined"] == (TURNS - 1) * len(said["rollouts"]) and not counts["sealed"]


@pytest.fixture(scope="module")
def langgraph(world: AgentWorld) -> dict[str, Any]:
    """What a LangGraph program says of its agents, by how they were made."""
    return world.said_by(LANGGRAPH, "langgraph_rollouts.py")


@pytest.mark.parametrize(
    ("form", "tagged"),
    [("url", 0), ("block", TURNS), ("responses_api", TURNS), ("graph", TURNS), ("graph_api", TURNS)],
)
def test_b05_the_turns_of_a_langgraph_agent_are_one_sequence(
    world: AgentWorld, langgraph: dict[str, Any], form: str, tagged: int
) -> None:
    said = langgraph[form]
    assert said["requests"] == [tagged] * len(said["rollouts"]) and said["astray"] == 0
    counts = check(world, form, said)
    assert counts["turns_joined"] == (TURNS - 1) * len(said["rollouts"]) and not counts["sealed"]


def test_b05_what_does_not_go_on_from_the_turn_before_is_sealed_and_counted(
    world: AgentWorld, langgraph: dict[str, Any]
) -> None:
    said = langgraph["forgetful"]
    counts = check(world, "forgetful", said)
    assert counts["sealed"] == (TURNS - 1) * len(said["rollouts"]) and not counts["turns_joined"]
