"""Writes a chat answer as a response of OpenAI's Responses API: whole, or as its events.

Neighbours: endpoint.py gives it what the chat route answers. Pure. Ids are made of the chat answer's own, so
that an answer that is asked for again has the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.gateway.dialects.chat_answer import ChatAnswer, Part
from runtime.gateway.dialects.responses_request import Body, ResponsesRequest
from runtime.shared.event_streams import as_last

# A request's fields that its response repeats, and their defaults.
_REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None, "reasoning": None,
    "safety_identifier": None, "service_tier": None, "temperature": 1.0, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None,
}  # fmt: skip
_TEXT = {"format": {"type": "text"}}
_TYPES = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def response_id(answer: ChatAnswer) -> str:
    """The response's name."""
    return f"resp_{answer.name}"


def response(request: ResponsesRequest, answer: ChatAnswer, status: str | None = None) -> Body:
    """The response object. `status` None: as the answer ended."""
    ended = "incomplete" if answer.is_cut_off else "completed"
    status = status or ended
    found: Body = {
        "id": response_id(answer),
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.model,
        "output": _output(answer) if status == ended else [],
        "store": request.stored,
        "text": request.body.get("text") or _TEXT,
        "usage": _usage(answer) if status == ended else None,
    }
    for name, default in _REPEATED.items():
        value = request.body.get(name)
        found[name] = default if value is None else value
    if answer.slipway is not None:
        found["slipway"] = answer.slipway
    return found


def _output(answer: ChatAnswer) -> list[Body]:
    """The items; of an answer that was cut off the last one is incomplete."""
    parts = _parts(answer)
    items = [_item(answer, part, "completed") for part in parts]
    if answer.is_cut_off:
        items[-1]["status"] = "incomplete"
    return items


def _parts(answer: ChatAnswer) -> list[Part]:
    """An answer without a text and a call has an empty text, never nothing."""
    has_output = any(part.kind != "reasoning" for part in answer.parts)
    return answer.parts if has_output else [*answer.parts, Part("text", len(answer.parts))]


def _item(answer: ChatAnswer, part: Part, status: str) -> Body:
    """An output item; in progress it is empty."""
    whole = status == "completed"
    item: Body = {"id": _item_id(answer, part), "type": _TYPES[part.kind], "status": status}
    if part.kind == "reasoning":
        return item | {"summary": [], "content": [_content(part)] if whole else []}
    if part.kind == "text":
        return item | {"role": "assistant", "content": [_content(part)] if whole else []}
    return item | {"call_id": part.call_id, "name": part.name, "arguments": part.text if whole else ""}


def _item_id(answer: ChatAnswer, part: Part) -> str:
    return f"{_PREFIXES[part.kind]}_{answer.name}_{part.place}"


def _content(part: Part, text: str | None = None) -> Body:
    content = part.text if text is None else text
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": content}
    return {
        "type": "output_text",
        "text": content,
        "annotations": [],
        "logprobs": [] if text is not None else part.logprobs,
    }


def _usage(answer: ChatAnswer) -> Body:
    given = answer.usage
    prompt, completion = given.get("prompt_tokens") or 0, given.get("completion_tokens") or 0
    cached = (given.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (given.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + completion,
    }


class ResponseEvents:
    """A streamed response, event by event."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self.answer = ChatAnswer(request.limit)
        self._number = 0
        self._open: Part | None = None

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chunk of the chat answer."""
        first = not self.answer.name
        grown = list(self.answer.take(chunk))
        if first:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=response(self._request, self.answer, "in_progress"))
        for part, text in grown:
            if part is not self._open:
                yield from self._close()
                yield from self._begin(part)
            if text:
                yield self._delta(part, text)

    def end(self) -> Iterator[bytes]:
        """The events after the last chunk."""
        for part in _parts(self.answer)[len(self.answer.parts) :]:  # an answer of nothing
            yield from self._close()
            yield from self._begin(part)
        yield from self._close()
        whole = response(self._request, self.answer)
        yield as_last(self._event(f"response.{whole['status']}", response=whole))

    def failed(self, error: Body) -> Iterator[bytes]:
        """The events of an answer that broke off."""
        whole = response(self._request, self.answer, "failed")
        whole["error"] = {"code": error.get("code") or "server_error", "message": error.get("message") or ""}
        yield self._event("response.failed", response=whole)

    def _begin(self, part: Part) -> Iterator[bytes]:
        self._open = part
        item = _item(self.answer, part, "in_progress")
        yield self._event("response.output_item.added", output_index=part.place, item=item)
        if part.kind != "call":
            yield self._of(part, "response.content_part.added", part=_content(part, ""))

    def _delta(self, part: Part, text: str) -> bytes:
        if part.kind == "call":
            return self._of(part, "response.function_call_arguments.delta", delta=text)
        if part.kind == "reasoning":
            return self._of(part, "response.reasoning_text.delta", delta=text)
        return self._of(part, "response.output_text.delta", delta=text, logprobs=[])

    def _close(self) -> Iterator[bytes]:
        part, self._open = self._open, None
        if part is None:
            return
        if part.kind == "call":
            name = "response.function_call_arguments.done"
            yield self._of(part, name, arguments=part.text, name=part.name)
        elif part.kind == "reasoning":
            yield self._of(part, "response.reasoning_text.done", text=part.text)
        else:
            yield self._of(part, "response.output_text.done", text=part.text, logprobs=part.logprobs)
        if part.kind != "call":
            yield self._of(part, "response.content_part.done", part=_content(part))
        item = _item(self.answer, part, "completed")
        if self.answer.is_cut_off and part.place >= len(self.answer.parts) - 1:
            item["status"] = "incomplete"
        yield self._event("response.output_item.done", output_index=part.place, item=item)

    def _of(self, of: Part, event: str, **fields: Any) -> bytes:
        """An event of one item; texts and thoughts have one content each."""
        place: Body = {"item_id": _item_id(self.answer, of), "output_index": of.place}
        if of.kind != "call":
            place["content_index"] = 0
        return self._event(event, **place, **fields)

    def _event(self, event: str, **fields: Any) -> bytes:
        body = {"type": event, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
