"""Gives refusals on Anthropic's routes Anthropic's form, whoever refuses.

Neighbours: gateway.py puts it around everything, so that the door's own refusals pass it too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.gateway.http.openai_errors import CONTEXT_LENGTH
from runtime.shared.anthropic_errors import in_anthropics_form, is_messages_route


class AnthropicErrors:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and is_messages_route(scope["path"]):
            send = _RewrittenErrors(send)
        await self._app(scope, receive, send)


class _RewrittenErrors:
    """ASGI's `send`: an answer of 400 and up is collected, and sent in Anthropic's form."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._start: dict[str, Any] | None = None
        self._content = b""

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._content += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse(self._start)

    async def _refuse(self, start: dict[str, Any]) -> None:
        try:
            error = msgspec.json.decode(self._content)["error"]
            if error.get("code") == CONTEXT_LENGTH:  # by these words harnesses know that they must shorten it
                error["message"] = f"prompt is too long: {error['message']}"
            body = msgspec.json.encode(in_anthropics_form(start["status"], error))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            body = self._content
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send(start | {"headers": headers})
        await self._send({"type": "http.response.body", "body": body})
