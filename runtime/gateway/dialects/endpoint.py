"""Stands around the routes for completions: a dialect's request becomes theirs, their answer the dialect's.

Neighbours: completions/proxy.py serves the translated request, and knows nothing of this; responses.py,
messages.py and generate.py say how requests and answers are translated. Refusals pass as they are:
`errors.py` gives them the form of their route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import msgspec

from runtime.gateway.completions import request_parsing
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests import request_fields
from runtime.gateway.requests.request_fields import Kind
from runtime.shared.headers import IGNORED_HEADER

Body = dict[str, Any]
Serve = Callable[[Kind, dict[str, Any], Any, Any], Awaitable[None]]

_END = b"[DONE]"


class Events(Protocol):
    """A streamed answer, translated chunk by chunk."""

    def feed(self, chunk: Body) -> Iterator[bytes]: ...
    def end(self) -> Iterator[bytes]: ...
    def failed(self, error: Body) -> Iterator[bytes]: ...


class TranslatedRequest(Protocol):
    """One request, and the way back for its answer.

    `translated`: its body for the route of its endpoint's kind; `ignored`: its fields without an effect here.
    """

    @property
    def translated(self) -> Body: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    def whole(self, answer: Body) -> Body: ...
    def events(self) -> Events: ...


class DialectEndpoint:
    """ASGI endpoint of one dialect. `begin` reads a request's body; it raises ApiError."""

    def __init__(self, serve: Serve, begin: Callable[[Body], TranslatedRequest], kind: Kind = "chat") -> None:
        self._serve = serve
        self._begin = begin
        self._kind: Kind = kind

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            content = await request_parsing.read_body(receive)
            # It may read kept responses; and other requests need not wait for a large one.
            translation, translated = await asyncio.to_thread(self._translate, content)
        except ApiError as error:
            await error.send(send)
            return
        await self._serve(self._kind, scope, _first(translated, receive), _TranslatedSend(translation, send))

    def _translate(self, content: bytes) -> tuple[TranslatedRequest, bytes]:
        translation = self._begin(checked(request_parsing.decode_object(content)))
        return translation, _encode(translation.translated)


def checked(body: Body) -> Body:
    """The body. Raises ApiError for what JSON can say and no answer: numbers past 64 bits, deep nesting."""
    try:
        for name, value in body.items():
            request_fields.check_content(name, value)
    except request_fields.BadField as error:
        raise ApiError(400, error.message, param=error.param) from error
    _encode(body)
    return body


def _encode(body: Body) -> bytes:
    """Raises ApiError for what cannot be written, such as half a character."""
    try:
        return msgspec.json.encode(body)
    except (OverflowError, ValueError, RecursionError) as error:
        raise ApiError(400, f"The body cannot be passed on: {error}") from error


def _first(content: bytes, receive: Any) -> Any:
    """`receive`, with this body as its first message."""
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def whole() -> dict[str, Any]:
        return messages.pop() if messages else await receive()

    return whole


class _TranslatedSend:
    """ASGI's `send` for the route behind: passes its answer on in the dialect's form."""

    def __init__(self, translation: TranslatedRequest, send: Any) -> None:
        self._translation = translation
        self._send = send
        self._start: dict[str, Any] | None = None
        self._length = -1
        self._content = b""
        self._events: Events | None = None

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._events is not None:
            events = b"".join(self._translated(self._events, message.get("body", b"")))
            more = message.get("more_body", False)
            if events or not more:
                await self._send(message | {"body": events})
        elif self._start is not None:
            await self._collect(message)
        else:
            await self._send(message)

    async def _begin(self, message: dict[str, Any]) -> None:
        headers = dict(message["headers"])
        if message["status"] != 200:
            await self._send(message)
            return
        if ignored := self._translation.ignored:
            before = headers.get(IGNORED_HEADER.encode(), b"")
            headers[IGNORED_HEADER.encode()] = b", ".join(filter(None, (before, ", ".join(ignored).encode())))
        self._length = int(headers.pop(b"content-length", b"-1"))
        started = message | {"headers": list(headers.items())}
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._events = self._translation.events()
            await self._send(started)
        else:
            self._start = started

    async def _collect(self, message: dict[str, Any]) -> None:
        """Send the whole answer with its last byte, not later: its delivery is recorded then (C52)."""
        self._content += message.get("body", b"")
        if self._start is None or len(self._content) < self._length:
            return
        start, self._start = self._start, None
        body = msgspec.json.encode(self._translation.whole(msgspec.json.decode(self._content)))
        length = (b"content-length", str(len(body)).encode())
        await self._send(start | {"headers": [*start["headers"], length]})
        await self._send(message | {"body": body})

    def _translated(self, events: Events, piece: bytes) -> Iterator[bytes]:
        *whole, self._content = (self._content + piece).split(b"\n\n")
        for event in whole:
            payload = event.removeprefix(b"data: ")
            if payload.strip() == _END:
                yield from events.end()
                continue
            chunk = msgspec.json.decode(payload)
            yield from events.failed(chunk["error"]) if "error" in chunk else events.feed(chunk)
