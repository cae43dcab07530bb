"""Collects a chat answer, whole or in parts, as a dialect's answer is made of it.

Neighbours: responses_answer.py and messages_answer.py write it in their forms. Pure. An answer that is given
in another dialect has one choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

_NOT_IN_IDS = re.compile(r"[^\w-]", re.ASCII)
_CHAT_ID = "chatcmpl-"

PartKind = Literal["reasoning", "text", "call"]


@dataclass
class Part:
    """One part of an answer: a thought, a text, or a call with its name and arguments (`text`)."""

    kind: PartKind
    place: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ChatAnswer:
    """What has come of an answer so far. `limit`: the most tokens that were asked for, if any.
    `name`: what ids of other dialects have of it."""

    limit: int | None = None
    name: str = ""
    created: int = 0
    model: str = ""
    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    # The sample's name and the version, by which it can be rewarded.
    slipway: dict[str, Any] | None = None

    def take(self, body: dict[str, Any]) -> Iterator[tuple[Part, str]]:
        """Add a whole answer, or a chunk of one; yields each part that grew, and by which text."""
        self.name = self.name or _NOT_IN_IDS.sub("", str(body.get("id") or "").removeprefix(_CHAT_ID))
        self.created = self.created or int(body.get("created") or 0)
        self.model = body.get("model") or self.model
        self.usage = body.get("usage") or self.usage
        for choice in (body.get("choices") or ())[:1]:
            self.slipway = choice.get("slipway") or self.slipway
            message = choice.get("message", choice.get("delta")) or {}
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if message.get("reasoning") or message.get("tool_calls"):
                logprobs = []  # they are of thought, calls and text together
            yield from self._take_message(message, logprobs)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason", self.stop_reason)

    def _take_message(
        self, message: dict[str, Any], logprobs: list[dict[str, Any]]
    ) -> Iterator[tuple[Part, str]]:
        if thought := message.get("reasoning"):
            yield self._grow("reasoning", thought)
        if text := message.get("content"):
            part, grown = self._grow("text", text)
            part.logprobs += logprobs
            yield part, grown
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield self._call(call.get("index", index), call)

    def _grow(self, kind: PartKind, text: str) -> tuple[Part, str]:
        last = self.parts[-1] if self.parts else None
        if last is None or last.kind != kind:
            last = Part(kind, len(self.parts))
            self.parts.append(last)
        last.text += text
        return last, text

    def _call(self, index: int, call: dict[str, Any]) -> tuple[Part, str]:
        calls = [part for part in self.parts if part.kind == "call"]
        function = call.get("function") or {}
        if index < len(calls):
            found = calls[index]
        else:
            found = Part("call", len(self.parts), call_id=str(call.get("id") or ""))
            self.parts.append(found)
        found.name += function.get("name") or ""
        grown = function.get("arguments") or ""
        found.text += grown
        return found, grown

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended at its limit. vLLM says "tool_calls" of an answer that was cut off in a call, and
        some parsers close what was open: nobody may run that."""
        if self.finish_reason != "tool_calls":
            return self.finish_reason == "length"
        if self.limit is not None:
            return (self.usage.get("completion_tokens") or 0) >= self.limit
        return self.has_broken_call

    @property
    def has_broken_call(self) -> bool:
        """Whether the arguments of a call are no JSON object."""
        return any(part.kind == "call" and arguments_of(part) is None for part in self.parts)

    def text_of(self, kind: PartKind) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    def as_message(self) -> dict[str, Any]:
        """It as the assistant's message of a later chat request."""
        calls = [
            {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
            for part in self.parts
            if part.kind == "call"
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.text_of("text") or None}
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = self.text_of("text")
        thought = self.text_of("reasoning")
        if thought and thought != message["content"]:  # an answer of a thought alone is given as text too
            message["reasoning"] = thought
        return message


def arguments_of(call: Part) -> dict[str, Any] | None:
    """A call's arguments; None if they are no JSON object."""
    try:
        found = msgspec.json.decode(call.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
