"""A trajectory as a judge sees it: the messages with their roles, and the tool calls with their arguments.

Details that differ by chance are left out: call ids are numbered instead, so that two trajectories with the
same content are equal. Neighbours: `judge_prompt.py` shows these. Knows nothing of judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher.client.trajectories.members import get_field, is_choice

Conversation = list[dict[str, Any]]


def conversation_of(trajectory: Any) -> Conversation:
    """Its messages, and behind them those of its further histories, each after a line that announces it."""
    shown = messages_shown(_entries(trajectory))
    for place, history in enumerate(get_field(trajectory, "additional_histories") or (), 1):
        shown += [{"further_conversation": place}, *messages_shown(_entries(history))]
    return shown


def messages_shown(entries: Iterable[Any]) -> Conversation:
    """Messages and choices, of an SDK or as JSON."""
    calls: dict[str, str] = {}
    return [_message(entry, calls) for entry in entries]


def _entries(history: Any) -> Iterable[Any]:
    return get_field(history, "messages_and_choices") or ()


def _message(entry: Any, calls: dict[str, str]) -> dict[str, Any]:
    message = get_field(entry, "message") if is_choice(entry) else entry
    role = "assistant" if is_choice(entry) else get_field(message, "role")
    shown: dict[str, Any] = {"role": str(role), "content": _content(get_field(message, "content"))}
    if tool_calls := get_field(message, "tool_calls"):
        shown["tool_calls"] = [_call(one, calls) for one in tool_calls]
    if (answers := get_field(message, "tool_call_id")) is not None:
        shown["answers"] = _numbered_call(str(answers), calls)
    if name := get_field(message, "name"):
        shown["name"] = str(name)
    return shown


def _call(call: Any, calls: dict[str, str]) -> dict[str, Any]:
    function = get_field(call, "function") or get_field(call, "custom") or {}
    arguments = get_field(function, "arguments")
    return {
        "call": _numbered_call(str(get_field(call, "id")), calls),
        "name": str(get_field(function, "name")),
        "arguments": str(get_field(function, "input") if arguments is None else arguments),
    }


def _numbered_call(name: str, calls: dict[str, str]) -> str:
    return calls.setdefault(name, f"call {len(calls) + 1}")


def _content(content: Any) -> str:
    """The text. Of parts that are no text, only their type."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Iterable):
        return str(content)
    return "\n".join(_part_text(one) for one in content)


def _part_text(one: Any) -> str:
    if isinstance(one, str):
        return one
    text = get_field(one, "text")
    return text if isinstance(text, str) else f"[{get_field(one, 'type')}]"


def tools_of(trajectories: Iterable[Any]) -> list[Any] | None:
    """The tools that the first of them has, as JSON."""
    for one in trajectories:
        if tools := get_field(one, "tools"):
            return [it if isinstance(it, Mapping) else it.model_dump(mode="json") for it in tools]
    return None
