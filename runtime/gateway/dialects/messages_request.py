"""Translates a request of Anthropic's Messages API into a chat request.

Neighbours: endpoint.py sends the result to the chat route, messages_answer.py translates the answer. Pure.
What only Anthropic's servers can do is refused by name; fields that chat has too are passed on, and checked
there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from runtime.gateway.completions import request_parsing
from runtime.gateway.dialects.chat_request import Body, Message, refuse, refuse_fields, tools_of, with_system

_OWN = frozenset(
    {
        "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking",
        "output_config", "output_format", "metadata", "mcp_servers", "container", "context_management",
        "betas", "cache_control", "inference_geo", "speed", "diagnostics",
    }
)  # fmt: skip
_REFUSED = {
    "mcp_servers": "it needs Anthropic's servers",
    "container": "it needs Anthropic's servers",
    "n": "a message is one answer: ask several times",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A line of Claude Code's that differs in each request: no conversation would go on from an earlier one.
_BILLING = "x-anthropic-billing-header"


@dataclass(frozen=True)
class MessagesRequest:
    """One request. `chat`: the chat request. `ignored`: fields of it that have no effect here."""

    chat: Body
    ignored: tuple[str, ...] = ()


def translate(body: Body, *, counts: bool = False) -> MessagesRequest:
    """The chat request; `counts`: its tokens are counted alone, and no limit is needed. Raises ApiError."""
    refuse_fields(body, _REFUSED)
    chat: Body = {name: value for name, value in body.items() if name not in _OWN}
    messages = with_system(_system(body.get("system")), _messages(body.get("messages")))
    chat["messages"] = _conversation(messages)
    if chat["messages"][-1]["role"] == "assistant" and not counts:
        refuse("messages", "ends with an answer: to go on in its middle is not served")
    most = body.get("max_tokens")
    if most is None and not counts:
        refuse("max_tokens", "is required")
    if most is not None:
        chat["max_tokens"] = most
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    thinking, ignored = _thinking(body.get("thinking"))
    if body.get("context_management"):  # what it takes out of a prompt is the client's to leave out
        ignored = (*ignored, "context_management")
    config = body.get("output_config") or {}
    if body.get("output_format") is not None and isinstance(config, dict):  # an older name
        config = {"format": body["output_format"]} | config
    chat |= _tools(body) | thinking | _output(config)
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return MessagesRequest(chat, ignored)


# ------------------------------------------------------------------ messages


def _system(system: Any) -> str:
    if system is None:
        return ""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        refuse("system", "is a text or a list of text blocks")
    return _texts(blocks, "system")


def _conversation(messages: list[Message]) -> list[Message]:
    """A system message in the middle, such as a harness's reminder, becomes the user's."""
    head = [message for message in messages[:1] if message["role"] == "system"]
    rest = [
        message | {"role": "user"} if message["role"] == "system" else message
        for message in messages[len(head) :]
        if message["role"] != "system" or message["content"]
    ]
    if not rest:
        refuse("messages", "has no message of the user")
    return [*head, *rest]


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        refuse("messages", "is a list of at least one message")
    found: list[Message] = []
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            refuse(f"messages[{place}].role", "is user or assistant")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            refuse(f"messages[{place}].content", "is a text or a list of blocks")
        where = f"messages[{place}].content"
        if role == "assistant":
            found.append(_answer(blocks, where))
        elif role == "system":
            found.append({"role": "system", "content": _texts(blocks, where)})
        else:
            found += _question(blocks, where)
    return found


def _question(blocks: list[Any], where: str) -> list[Message]:
    """The results of tools first, each a message, as a chat has them; then what the user says."""
    results, texts = [], []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(_tool_result(block, f"{where}[{index}]"))
        else:
            texts.append(_text(block, f"{where}[{index}]"))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _tool_result(block: Body, where: str) -> Message:
    content = block.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not isinstance(block.get("tool_use_id"), str):
        refuse(where, "has a tool_use_id, and a text or a list of text blocks")
    text = _texts(blocks, f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _answer(blocks: list[Any], where: str) -> Message:
    thoughts, texts, calls = [], [], []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":  # of another server: only it can read it
            continue
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}[{index}]"))
        else:
            texts.append(_text(block, f"{where}[{index}]"))
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return message


def _call(block: Body, where: str) -> Body:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(block.get("id"), str) or not isinstance(given, dict):
        refuse(where, "has an id, a name and an input")
    arguments = json.dumps(given, ensure_ascii=False)  # with blanks, as models write it
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(blocks: list[Any], where: str) -> str:
    texts = [_text(block, f"{where}[{index}]") for index, block in enumerate(blocks)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise request_parsing.not_text(where, kind)
    if not isinstance(block.get("text"), str):
        refuse(where, "has no text")
    return block["text"]


# ------------------------------------------------------------------ settings


def _tools(body: Body) -> Body:
    tools = tools_of(body, _tool)
    if not tools:
        return {}
    found: Body = {"tools": tools}
    choice = body.get("tool_choice")
    if choice is None:
        return found
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        found["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        found["tool_choice"] = _CHOICES[kind]
    else:
        refuse("tool_choice", "is of type auto, any, none, or tool with a name")
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _tool(tool: Any, place: int) -> Body:
    kind = tool.get("type", "custom") if isinstance(tool, dict) else None
    if kind not in (None, "custom") or not isinstance(tool, dict):
        what = f"{kind[:40]!r}" if isinstance(kind, str) else "no tool"
        refuse(f"tools[{place}]", f"is {what}: tools with an input_schema are served, which you run yourself")
    function: Body = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _thinking(thinking: Any) -> tuple[Body, tuple[str, ...]]:
    """The template's switch, where the request says; a budget has no effect: tokens that end a thought would
    not be the policy's own."""
    if thinking is None:
        return {}, ()
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        refuse("thinking", "is of type enabled, disabled or adaptive")
    ignored = ("thinking.budget_tokens",) if thinking.get("budget_tokens") is not None else ()
    if kind == "adaptive":
        return {}, ignored
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}, ignored


def _output(config: Any) -> Body:
    if not isinstance(config, dict):
        refuse("output_config", "is an object")
    found: Body = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            refuse("output_config.format", "is of type json_schema")
        schema = {"name": "answer", "schema": form.get("schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found
