"""Translates a request of OpenAI's Responses API into a chat request.

Neighbours: endpoint.py sends the result to the chat route, responses_answer.py translates the answer,
response_store.py has the conversation behind a `previous_response_id`. Pure. What only OpenAI's servers can
do is refused by name; fields that chat has too are passed on, and checked there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.gateway.completions import request_parsing
from runtime.gateway.dialects.chat_request import Body, Message, refuse, refuse_fields, tools_of, with_system

_TEXT_PARTS = ("input_text", "output_text", "text")
_SYSTEM = ("system", "developer")
# Of one answer; they become one message.
_ANSWER_ITEMS = ("reasoning", "message", "function_call")
_INCLUDED_LOGPROBS = "message.output_text.logprobs"
# Fields of this API alone: read below, repeated in the answer, or without an effect here.
_OWN = frozenset(
    {
        "input", "instructions", "previous_response_id", "max_output_tokens", "text", "reasoning", "include",
        "tools", "tool_choice", "truncation", "background", "conversation", "prompt", "max_tool_calls",
        "stream_options", "top_logprobs", "store", "context_management", "prompt_cache_options",
    }
)  # fmt: skip
_REFUSED = {
    "background": "ask without it, and wait for the answer",
    "conversation": "continue a response by previous_response_id, or send the whole conversation as input",
    "prompt": "templates are kept by OpenAI's servers: send the text as input",
    "n": "a response has one answer: ask several times",
    "messages": "it is chat's field: the conversation is the input here",
}
# Fields that change a conversation at OpenAI's, and nothing here.
_IGNORED = ("max_tool_calls", "context_management")

# Ids of an answer's items, as responses_answer.py makes them: the answer's name is in them.
ITEM_ID = re.compile(r"(?:rs|msg|fc)_([\w-]{1,160})_\d+", re.ASCII)


@dataclass(frozen=True)
class ResponsesRequest:
    """One request. `body`: as it came. `chat`: the chat request. `given`: the messages of its own input."""

    body: Body
    chat: Body
    given: list[Message]

    @property
    def previous(self) -> str | None:
        """The response that it goes on from."""
        return self.body.get("previous_response_id")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of it that have no effect here."""
        names = [name for name in _IGNORED if self.body.get(name)]
        return (*names, "truncation") if self.body.get("truncation") == "auto" else tuple(names)

    @property
    def limit(self) -> int | None:
        """The tokens that it asks for at most."""
        most = self.body.get("max_output_tokens")
        return most if isinstance(most, int) else None

    @property
    def stored(self) -> bool:
        """Whether later requests may name its response."""
        return self.body.get("store") is not False


def previous_response(body: Body) -> str | None:
    """The name of the response that a request goes on from. Raises ApiError."""
    name = body.get("previous_response_id")
    if name is not None and not isinstance(name, str):
        refuse("previous_response_id", "is the id of a response")
    return name


def _unknown(name: str) -> None:
    """Where nothing is kept, a reference means nothing."""


def translate(
    body: Body, earlier: Sequence[Message] = (), item: Callable[[str], Body | None] = _unknown
) -> ResponsesRequest:
    """The chat request. `earlier`: the messages of the responses that it goes on from; `item`: an item of a
    kept response by its id. Raises ApiError."""
    refuse_fields(body, _REFUSED)
    given = _messages(_whole_items(body.get("input"), item))
    chat: Body = {name: value for name, value in body.items() if name not in _OWN}
    if not isinstance(instructions := body.get("instructions") or "", str):
        refuse("instructions", "is a text")
    chat["messages"] = with_system(instructions, [*earlier, *given])
    chat |= _limits(body) | _tools(body) | _text(body) | _reasoning(body) | _logprobs(body)
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return ResponsesRequest(body, chat, given)


# ------------------------------------------------------------------ input


def _whole_items(given: Any, item: Callable[[str], Body | None]) -> Any:
    """The input with the items in place of references to them; clients of kept responses send those."""
    if not isinstance(given, list):
        return given
    return [
        _referred(one, place, item) if isinstance(one, dict) and one.get("type") == "item_reference" else one
        for place, one in enumerate(given)
    ]


def _referred(reference: Body, place: int, item: Callable[[str], Body | None]) -> Body:
    name = reference.get("id")
    found = item(name) if isinstance(name, str) else None
    if found is None:
        way_out = "send the item itself"
        refuse(f"input[{place}]", f"refers to an item that is not, or no longer, kept: {way_out}")
    return found


def _messages(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        refuse("input", "is a text or a list of items")
    found: list[Message] = []
    answer = None  # the name of the answer that the last item is of
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            refuse(f"input[{place}]", "is not an item")
        kind = item.get("type") or ("message" if "role" in item else None)
        before, answer = answer, None
        if kind == "function_call_output":
            found.append(_tool_result(item, place))
        elif kind not in _ANSWER_ITEMS:
            _refuse_item(kind, place)
        elif kind == "message" and item.get("role") != "assistant":
            found.append(_message(item, place))
        else:
            answer = _answer_of(item)
            _add_to_answer(found, kind, item, place, same=answer is not None and answer == before)
    if not found:
        refuse("input", "has no item")
    return found


def _answer_of(item: Body) -> str | None:
    """The name of the answer that an item of ours is of, by its id."""
    name = item.get("id")
    found = ITEM_ID.fullmatch(name) if isinstance(name, str) else None
    return found[1] if found else None


def _message(item: Body, place: int) -> Message:
    role = item.get("role")
    if role not in ("user", *_SYSTEM):
        refuse(f"input[{place}].role", "is user, assistant, system or developer")
    return {
        "role": "system" if role in _SYSTEM else role,
        "content": _content(item.get("content"), f"input[{place}].content"),
    }


def _tool_result(item: Body, place: int) -> Message:
    output = item.get("output")
    text = _content(output, f"input[{place}].output")
    return {"role": "tool", "tool_call_id": _text_of(item, "call_id", place), "content": text}


def _add_to_answer(found: list[Message], kind: str, item: Body, place: int, *, same: bool) -> None:
    """Add an item of an answer to the assistant's message that the items before it are, or begin one.

    `same`: by its id it is of the same answer as the item before.
    """
    is_answer = bool(found) and found[-1]["role"] == "assistant"
    if not is_answer or not (same or kind == "function_call" or not _is_whole(found[-1])):
        found.append({"role": "assistant", "content": None})
    message = found[-1]
    if kind == "reasoning":
        message["reasoning"] = message.get("reasoning", "") + _thought(item)
    elif kind == "message":
        text = _content(item.get("content"), f"input[{place}].content", between="")
        message["content"] = (message["content"] or "") + text
    else:
        call = {"name": _text_of(item, "name", place), "arguments": _text_of(item, "arguments", place)}
        calls = message.setdefault("tool_calls", [])
        calls.append({"id": _text_of(item, "call_id", place), "type": "function", "function": call})


def _is_whole(message: Message) -> bool:
    """Whether an assistant's message has its text or a call, so that another text is another message."""
    return message["content"] is not None or "tool_calls" in message


def _thought(item: Body) -> str:
    """A reasoning item's text; without its content the summary says it. An encrypted one has none."""
    parts = item.get("content") or item.get("summary") or ()
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _content(content: Any, place: str, between: str = "\n") -> str:
    """The text of all parts. What a client says in several is joined as vLLM joins a chat's."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(place, "is a text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise request_parsing.not_text(f"{place}[{index}]", kind, param="input")
        if not isinstance(text, str):
            refuse(f"{place}[{index}]", "has no text")
        texts.append(text)
    return between.join(texts)


# ------------------------------------------------------------------ settings


def _limits(body: Body) -> Body:
    most = body.get("max_output_tokens")
    return {} if most is None else {"max_completion_tokens": most}


def _tools(body: Body) -> Body:
    tools = tools_of(body, _tool)
    if not tools:
        return {}
    found: Body = {"tools": tools}
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            refuse("tool_choice", 'is "auto", "none", "required" or one function by its name')
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return found if choice is None else found | {"tool_choice": choice}


def _tool(tool: Any, place: int) -> Body:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        what = f"{kind[:40]!r}" if isinstance(kind, str) else "no tool"
        refuse(f"tools[{place}]", f"is {what}: functions are served, which your program calls itself")
    wanted = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in wanted if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _text(body: Body) -> Body:
    """`text.format` is chat's response_format, with the schema's fields a level higher."""
    text = body.get("text")
    if text is not None and not isinstance(text, dict):
        refuse("text", "is an object")
    form = (text or {}).get("format")
    if form is None:
        return {}
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        refuse("text.format", "is of type text, json_object or json_schema")
    if form["type"] != "json_schema":
        return {"response_format": {"type": form["type"]}}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _reasoning(body: Body) -> Body:
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        refuse("reasoning", "is an object")
    effort = (reasoning or {}).get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _logprobs(body: Body) -> Body:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        refuse("include", "is a list")
    top = body.get("top_logprobs")
    if _INCLUDED_LOGPROBS not in (include or ()) and not top:
        return {}
    return {"logprobs": True, "top_logprobs": top or 0}


def _text_of(item: Body, name: str, place: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        refuse(f"input[{place}].{name}", "is a text")
    return value


def _refuse_item(kind: Any, place: int) -> NoReturn:
    shown = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
    refuse(f"input[{place}]", f"is {shown}: messages, reasoning, function calls and outputs are served")
