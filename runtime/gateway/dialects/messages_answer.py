"""Writes a chat answer as a message of Anthropic's Messages API: whole, or as its events.

Neighbours: endpoint.py gives it what the chat route answers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.gateway.dialects.chat_answer import ChatAnswer, Part, arguments_of
from runtime.shared.anthropic_errors import in_anthropics_form
from runtime.shared.event_streams import as_last

Body = dict[str, Any]

# Clients send a thought back only with a signature, which Anthropic's servers make.
_SIGNATURE = "slipway"
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def message(answer: ChatAnswer) -> Body:
    """The whole message."""
    found = _head(answer) | {
        "content": [_block(part, whole=True) for part in parts_of(answer)],
        "stop_reason": _stop_reason(answer),
        "stop_sequence": _stop_sequence(answer),
    }
    return found if answer.slipway is None else found | {"slipway": answer.slipway}


def _head(answer: ChatAnswer) -> Body:
    return {
        "id": f"msg_{answer.name}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def parts_of(answer: ChatAnswer) -> list[Part]:
    """An answer of nothing has an empty text: clients read the first block."""
    return answer.parts or [Part("text", 0)]


def _block(part: Part, *, whole: bool) -> Body:
    """A content block; at its begin it is empty."""
    text = part.text if whole else ""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if whole else ""}
    if part.kind == "text":
        return {"type": "text", "text": text}
    given = arguments_of(part) if whole else None
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given or {}}


def _stop_sequence(answer: ChatAnswer) -> str | None:
    """The stop that ended it; what made a whole call is a call."""
    is_call = any(part.kind == "call" for part in answer.parts) and not answer.has_broken_call
    ended = answer.finish_reason in ("stop", "tool_calls") and isinstance(answer.stop_reason, str)
    return answer.stop_reason if ended and not is_call else None


def _stop_reason(answer: ChatAnswer) -> str:
    if _stop_sequence(answer) is not None:
        return "stop_sequence"
    if answer.is_cut_off or answer.has_broken_call:  # a block has an object, or nothing that may be run
        return "max_tokens"
    return "tool_use" if any(part.kind == "call" for part in answer.parts) else "end_turn"


def _usage(answer: ChatAnswer) -> Body:
    given = answer.usage
    cached = (given.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": (given.get("prompt_tokens") or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": given.get("completion_tokens") or 0,
    }


class MessageEvents:
    """A streamed message, event by event."""

    def __init__(self, limit: int | None = None) -> None:
        self.answer = ChatAnswer(limit)
        self._open: Part | None = None

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chunk of the chat answer."""
        first = not self.answer.name
        grown = list(self.answer.take(chunk))
        if first:
            yield _event("message_start", message=_head(self.answer))
        for part, text in grown:
            if part is not self._open:
                yield from self._close()
                yield from self._begin(part)
            if text:
                kind, field = _DELTAS[part.kind]
                yield _event("content_block_delta", index=part.place, delta={"type": kind, field: text})

    def end(self) -> Iterator[bytes]:
        """The events after the last chunk."""
        for part in () if self.answer.parts else parts_of(self.answer):
            yield from self._begin(part)
        yield from self._close()
        answer = self.answer
        delta: Body = {"stop_reason": _stop_reason(answer), "stop_sequence": _stop_sequence(answer)}
        named = {} if answer.slipway is None else {"slipway": answer.slipway}
        yield _event("message_delta", delta=delta, usage=_usage(answer), **named)
        yield as_last(_event("message_stop"))

    def failed(self, error: Body) -> Iterator[bytes]:
        """The events of an answer that broke off."""
        body = in_anthropics_form(503 if error.get("code") == "not_ready" else 500, error)
        yield b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def _begin(self, part: Part) -> Iterator[bytes]:
        self._open = part
        yield _event("content_block_start", index=part.place, content_block=_block(part, whole=False))

    def _close(self) -> Iterator[bytes]:
        part, self._open = self._open, None
        if part is None:
            return
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=part.place, delta=delta)
        yield _event("content_block_stop", index=part.place)


def _event(event: str, **fields: Any) -> bytes:
    body = {"type": event, **fields}
    return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
