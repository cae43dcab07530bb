"""Refuses a request whose grammar would be so large that the engine answers nobody else for a while.

vLLM compiles the grammar of a forced or strict tool, or of a format, when it first sees it: 200 tools take a
second, 2,000 tools 40 to 120, and other requests wait for seconds meanwhile. OpenAI takes at most 128 tools.
Neighbours: request_fields.py has all other fields, distribution.py knows which make a grammar. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.gateway.requests import distribution
from runtime.gateway.requests.request_fields import BadField
from runtime.gateway.requests.text_length import characters

MAX_CHARACTERS = 100_000
# Fields of which a grammar is made.
_FIELDS = ("response_format", "structured_outputs")
_BY_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


def check_grammar_size(body: Mapping[str, Any]) -> None:
    """Raises BadField, naming the field. Tools that the model may use or not, none of them strict, make no
    grammar and have no bound here."""
    fields = {name: body[name] for name in _FIELDS if name in body}
    if distribution.grammar({name: body.get(name) for name in _BY_TOOLS}) is not None:
        fields["tools"] = body.get("tools")
    for name, value in fields.items():
        if (count := characters(value)) > MAX_CHARACTERS:
            raise BadField(
                name,
                f"{name!r} has {count:,} characters for a grammar, and at most {MAX_CHARACTERS:,} are taken: "
                "others would wait while the engine compiles it. Give fewer tools or a smaller schema; "
                'tools that are not strict, under tool_choice "auto", need no grammar',
            )
