"""Adjusts a request's tools for the engine: no grammar in a rollout, the tool's schema for a forced call.

vLLM 0.32 keeps the arguments of a `strict` tool to their schema by a grammar, also if the model may answer in
words, and keeps calls to one (`parallel_tool_calls: false`) by a grammar for the whole call: then no answer
is the policy's own any more (C9). For a tool that is not strict it takes any JSON as the arguments of a
forced call, a number or a text too.
Neighbours: request_parsing.py removes grammars, answers.py gives the first call alone, request_fields.py adds
a forced call's schema; distribution.py decides which samples may be trained on. Pure.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

# The name in an answer's header of ignored fields.
STRICT = "tools.strict"
ONE_CALL = "parallel_tool_calls"
_FREE = (None, "auto")
_UNFORCED = (*_FREE, "none")
# One of these without a `type` beside it describes the arguments itself.
_NON_OBJECT_SCHEMAS = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")


class NotAnObjectError(ValueError):
    """Arguments that are no object: no client could pass them to a function."""


def without_tool_grammar(body: Body) -> tuple[Body, tuple[str, ...]]:
    """The body without the fields that make a grammar of optional tools, and the names of those fields.

    Unchanged if a call is forced or forbidden: the grammar costs no sample there.
    """
    tools = body.get("tools")
    if body.get("tool_choice") not in _FREE or not isinstance(tools, list):
        return body, ()
    ignored: tuple[str, ...] = ()
    if any(_function(tool).get("strict") for tool in tools):
        body, ignored = body | {"tools": [_without_strict(tool) for tool in tools]}, (STRICT,)
    if tools and body.get(ONE_CALL) is False:
        body = {name: value for name, value in body.items() if name != ONE_CALL}
        ignored = (*ignored, ONE_CALL)
    return body, ignored


def with_strict_tools(body: Body) -> Body:
    """The body with every tool strict if a call is forced. Raises NotAnObjectError, naming the tool."""
    tools = body.get("tools")
    if body.get("tool_choice") in _UNFORCED or not isinstance(tools, list):
        return body
    return body | {"tools": [_strict(tool) for tool in tools]}


def _function(tool: Any) -> Body:
    """A tool's function; empty if it has none, which the engine refuses in its own words."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _without_strict(tool: Any) -> Any:
    function = _function(tool)
    if not function.get("strict"):
        return tool
    return tool | {"function": {name: value for name, value in function.items() if name != "strict"}}


def _strict(tool: Any) -> Any:
    function = _function(tool)
    if not function:
        return tool
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}}
    if isinstance(schema, dict):
        schema = _of_an_object(schema, function.get("name"))
    return tool | {"function": function | {"parameters": schema, "strict": True}}


def _of_an_object(schema: Body, name: Any) -> Body:
    kind = schema.get("type")
    if kind is None and any(word in schema for word in _NON_OBJECT_SCHEMAS):
        return schema
    if kind is not None and kind != "object":
        raise NotAnObjectError(
            f"the parameters of {str(name)[:80]!r} are no object, and a call passes them by name: "
            'give them `"type": "object"` and properties'
        )
    return schema | {"type": "object"}
