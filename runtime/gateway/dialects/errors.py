"""Gives refusals on Anthropic's routes Anthropic's form, whoever refuses.

Neighbours: gateway.py puts it around everything, so that the door's own refusals pass it too.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from runtime.gateway.dialects import messages_answer

_ROUTES = re.compile(r"(?:/rollouts/[^/]+)?/v1/messages(?:/count_tokens)?")


class DialectErrors:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and _ROUTES.fullmatch(scope["path"]):
            send = _AnthropicErrors(send)
        await self._app(scope, receive, send)


class _AnthropicErrors:
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
            given = msgspec.json.decode(self._content)["error"]
            body = msgspec.json.encode(messages_answer.in_anthropics_form(start["status"], given))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            body = self._content
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send(start | {"headers": headers})
        await self._send({"type": "http.response.body", "body": body})
