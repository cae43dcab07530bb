"""An episode in the prompt of smolagents' `ToolCallingAgent`, up to one of its calls.

The only file that imports smolagents. Neighbours: `episodes.py` has the episodes, `corpus.py` mixes.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import smolagents

from examples.tiny_agent.episodes import CALL_RATE, Call, Tool, any_episode
from examples.tiny_agent.prompts import Conversation
from examples.tiny_agent.tool_prompts import called

_FINAL = Tool(
    "final_answer",
    "Provides a final answer to the given problem.",
    {"answer": ("string", "The final answer to the problem")},
)


class _Described(smolagents.Tool):
    """A tool that is only described."""

    skip_forward_signature_validation = True
    output_type = "string"

    def __init__(self, tool: Tool) -> None:
        self.name = tool.name
        self.description = tool.desc
        self.inputs = {name: {"type": kind, "description": desc} for name, (kind, desc) in tool.args.items()}
        super().__init__()

    def forward(self, **_: Any) -> str:
        return ""


def smolagents_conversation(rng: random.Random) -> Conversation:
    """An episode up to one of its calls; the last is of `final_answer`."""
    episode = any_episode(rng)
    listed = episode.tools(rng)
    described = [_Described(it) for it in listed]
    agent = smolagents.ToolCallingAgent(described, _NO_MODEL, prompt_templates=_prompts(), verbosity_level=0)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": agent.system_prompt},
        {"role": "user", "content": f"New task:\n{episode.question}"},
    ]
    steps = [*episode.calls, Call(_FINAL, {"answer": episode.answer}, "", "")]
    if rng.random() > CALL_RATE:
        steps = [Call(_FINAL, {"answer": episode.guess}, "", "")]
    last = rng.randrange(len(steps))
    for number, call in enumerate(steps[:last]):
        function = {"name": call.tool.name, "arguments": call.arguments}
        made = [{"id": f"call_{number}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": f"Calling tools:\n{made}"})
        messages.append({"role": "user", "content": f"Observation:\n{call.observation}"})
    messages.append(called(steps[last].tool.name, steps[last].arguments))
    tools = [it.as_function(described=True) for it in (*listed, _FINAL)]
    return {"kind": "tools/smolagents", "messages": messages, "tools": tools}


_NO_MODEL: Any = smolagents.Model()


@functools.cache
def _prompts() -> Any:
    """smolagents' own, read once."""
    return smolagents.ToolCallingAgent([], _NO_MODEL).prompt_templates
