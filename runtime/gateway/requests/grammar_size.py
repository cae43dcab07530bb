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
# The form of a call, around name and arguments; each tool's is compiled. 2,000 of them alone take 9 s.
_CALL_CHARACTERS = 100
# Keys whose text no grammar has. Where the value is of another type, the key is an argument's name.
_ANNOTATIONS: Mapping[str, type] = {"description": str, "title": str, "examples": list}
# Keys whose values are an argument's, not schemas.
_VALUES = ("enum", "const")


def check_grammar_size(body: Mapping[str, Any]) -> None:
    """Raises BadField, naming the field. Tools that the model may use or not, none of them strict, make no
    grammar and have no bound here."""
    counts = {name: characters(body[name]) for name in _FIELDS if name in body}
    if distribution.grammar({name: body.get(name) for name in _BY_TOOLS}) is not None:
        counts["tools"] = _tools_characters(body.get("tools"), body.get("tool_choice"))
    for name, count in counts.items():
        if count > MAX_CHARACTERS:
            raise BadField(
                name,
                f"{name!r} has {count:,} characters for a grammar, and at most {MAX_CHARACTERS:,} are taken: "
                "others would wait while the engine compiles it. Give fewer tools or a smaller schema; "
                'tools that are not strict, under tool_choice "auto" and with parallel_tool_calls, '
                "need no grammar",
            )


def _tools_characters(tools: Any, choice: Any) -> int:
    """What is compiled of them: of a forced tool itself alone, and under "auto" strict tools' arguments."""
    forced = _function(choice).get("name")
    count = 0
    for function in map(_function, tools if isinstance(tools, list) else ()):
        if forced is not None and function.get("name") != forced:
            continue
        count += _CALL_CHARACTERS + characters(function.get("name"))
        if choice not in (None, "auto") or function.get("strict"):
            count += _schema_characters(function.get("parameters"))
    return count


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _schema_characters(schema: Any) -> int:
    """The characters of a JSON schema without its annotations."""
    count, left = 0, [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif not isinstance(one, dict):
            count += characters(one)
        else:
            for name, value in one.items():
                if isinstance(value, _ANNOTATIONS.get(name, ())):
                    continue
                count += len(name)
                if name in _VALUES:
                    count += characters(value)
                else:
                    left.append(value)
    return count
