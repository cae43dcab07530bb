"""What the dialects' requests have in common on their way to a chat request.

Neighbours: responses_request.py and messages_request.py read the dialects; chat_answer.py is the way back.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from runtime.gateway.http.openai_errors import ApiError

Body = dict[str, Any]
Message = dict[str, Any]


def refuse(param: str, what: str) -> NoReturn:
    """400: `param` may name a place in it, as in "input[3].content"."""
    raise ApiError(400, f"{param} {what}", param=param.partition("[")[0])


def refuse_fields(body: Body, reasons: Mapping[str, str]) -> None:
    """Refuse fields that are not served, each with its reason; one that asks for nothing may stand there."""
    for name, reason in reasons.items():
        if body.get(name) and not (name == "n" and body[name] == 1):
            refuse(name, f"is not served: {reason}")


def with_system(instructions: str, messages: Sequence[Message]) -> list[Message]:
    """The conversation with its instructions and its first system messages as one: templates take one, at
    the beginning."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    texts = (instructions, *(message["content"] for message in messages[:leading]))
    system = "\n\n".join(text for text in texts if text)
    rest = list(messages[leading:])
    return [{"role": "system", "content": system}, *rest] if system else rest


def tools_of(body: Body, translated: Callable[[Any, int], Body]) -> list[Body]:
    """A request's tools, each translated with its place; [] if there are none."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        refuse("tools", "is a list")
    return [translated(tool, place) for place, tool in enumerate(tools)]
