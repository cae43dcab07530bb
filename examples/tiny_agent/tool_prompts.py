"""Episodes as the frameworks write them: DSPy's ReAct, DSPy's native calls, and `tools` of a chat request.

Neighbours: `episodes.py` has the questions and tools, `corpus.py` mixes the conversations made here.
"""

from __future__ import annotations

import random
from typing import Any

import dspy
from dspy.signatures.signature import make_signature

from examples.tiny_agent.episodes import CALL_RATE, Episode, Tool, any_episode
from examples.tiny_agent.prompts import ADAPTERS, Conversation, any_adapter, conversation_of
from examples.tiny_agent.tasks import CAREFUL, NEUTRAL

_QUESTION_NAMES = ("question", "question", "question", "query", "task", "request", "problem", "user_request")
_ANSWER_NAMES = ("answer", "answer", "answer", "result", "response", "reply", "output")


def react_conversations(rng: random.Random) -> list[Conversation]:
    """The calls of an episode of `dspy.ReAct`, in two formats: choose a tool, finish, extract the answer."""
    episode = any_episode(rng)
    asked, target = rng.choice(_QUESTION_NAMES), rng.choice(_ANSWER_NAMES)
    instruction = rng.choice(_REACT_INSTRUCTIONS + CAREFUL[:2] + NEUTRAL[:2])
    tools: list[Any] = [_dspy_tool(it) for it in episode.tools(rng)]
    signature: Any = make_signature(f"{asked} -> {target}", instruction or None)
    react = dspy.ReAct(signature, tools=tools)
    names = rng.sample([*ADAPTERS], 2)
    return [row for name in names for row in _react_rows(rng, react, episode, (asked, target), name)]


_REACT_INSTRUCTIONS = (
    "",
    "",
    "",
    "",
    "Answer the question.",
    "Use the tools to answer.",
    "Answer with the help of the tools.",
)


def _react_rows(
    rng: random.Random, react: dspy.ReAct, episode: Episode, names: tuple[str, str], adapter_name: str
) -> list[Conversation]:
    asked, target = names
    adapter = ADAPTERS[adapter_name]
    trajectory: dict[str, Any] = {}
    rows: list[Conversation] = []

    def row(kind: str, signature: Any, outputs: dict[str, Any]) -> None:
        with dspy.context(adapter=adapter):
            told = react._format_trajectory(trajectory)
        inputs = {asked: episode.question, "trajectory": told}
        rows.append(conversation_of(kind, adapter_name, signature, inputs, outputs))

    def step(thought: str, tool: str, arguments: dict[str, Any], observation: str) -> None:
        chosen = {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}
        row("react", react.react.signature, chosen)
        number = len(trajectory) // 4
        names = (f"{it}_{number}" for it in ("thought", "tool_name", "tool_args", "observation"))
        trajectory.update(zip(names, (thought, tool, arguments, observation), strict=True))

    guessing = rng.random() > CALL_RATE
    answer = episode.guess if guessing else episode.answer
    for call in [] if guessing else episode.calls:
        step(call.thought, call.tool.name, call.arguments, call.observation)
    known = rng.choice((f"I know it: {answer}.", f"The answer is {answer}."))
    step("I think that I know it." if guessing else known, "finish", {}, "Completed.")
    row(
        "react_answer",
        react.extract.predict.signature,
        {"reasoning": f"The answer is {answer}.", target: answer},
    )
    return rows


def _dspy_tool(tool: Tool) -> dspy.Tool:
    args = {name: {"type": kind} for name, (kind, _) in tool.args.items()}
    return dspy.Tool(lambda **_: "", name=tool.name, desc=tool.desc, args=args)


def native_conversation(rng: random.Random) -> Conversation:
    """DSPy's call with `use_native_function_calling`: the adapter's prompt without outputs, and `tools`."""
    name = any_adapter(rng)
    episode = any_episode(rng)
    asked = rng.choice(_QUESTION_NAMES)
    instruction = rng.choice(
        ("Answer the question.", "Use the tools to answer.", "Call the right tool.", "Answer.")
    )
    signature: Any = make_signature({asked: (str, dspy.InputField())}, instruction)
    messages: list[dict[str, Any]] = ADAPTERS[name].format(signature, [], {asked: episode.question})
    call = episode.calls[0]
    messages.append(called(call.tool.name, call.arguments))
    tools = [it.as_function(described=False) for it in episode.tools(rng)]
    return {"kind": f"native/{name}", "messages": messages, "tools": tools}


# --- as `tools` of a chat request

_SYSTEMS = (
    "",
    "",
    "You are a helpful assistant.",
    "You are a helpful agent.",
    "Use the tools to answer.",
    "Answer with the help of your tools.",
    "You can call tools. Answer briefly.",
    "You are a shop assistant.",
    "Call a tool when you need a fact or a number.",
)


def chat_conversation(rng: random.Random) -> Conversation:
    """One or two questions, each answered by calls of tools; now and then a guess without."""
    episodes = [any_episode(rng) for _ in range(rng.choices((1, 2), (8, 2))[0])]
    tools: dict[str, Tool] = {}
    for episode in episodes:
        for it in episode.tools(rng):
            if it.name in tools and tools[it.name] != it:
                return chat_conversation(rng)
            tools[it.name] = it
    system = rng.choice(_SYSTEMS)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    in_sentences = rng.random() < 0.35
    for episode in episodes:
        messages.append({"role": "user", "content": episode.question})
        if rng.random() > CALL_RATE:
            messages.append({"role": "assistant", "content": episode.guess, "trained": True})
            continue
        for call in episode.calls:
            messages.append(called(call.tool.name, call.arguments))
            messages.append({"role": "tool", "content": call.observation})
        content = episode.sentence if in_sentences else episode.answer
        messages.append({"role": "assistant", "content": content, "trained": True})
    described = rng.random() < 0.6
    return {
        "kind": "tools/native",
        "messages": messages,
        "tools": [it.as_function(described) for it in tools.values()],
    }


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], "trained": True}
