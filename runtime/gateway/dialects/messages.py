"""Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Neighbours: gateway.py mounts the routes, endpoint.py asks for each request's translation,
messages_request.py and messages_answer.py translate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from runtime.gateway.completions import request_parsing
from runtime.gateway.dialects import messages_answer, messages_request
from runtime.gateway.dialects.chat_answer import ChatAnswer
from runtime.gateway.dialects.endpoint import DialectEndpoint, Serve, checked
from runtime.gateway.dialects.messages_answer import MessageEvents
from runtime.gateway.dialects.messages_request import Body, MessagesRequest

# A chat request's prompt, in token ids.
RenderPrompt = Callable[[Body], Awaitable[list[int]]]


class MessagesTranslation:
    """One request and its answer."""

    def __init__(self, request: MessagesRequest) -> None:
        self.translated = request.chat
        self.ignored = request.ignored
        limit = request.chat.get("max_tokens")
        self._limit = limit if isinstance(limit, int) else None

    def whole(self, answer: Body) -> Body:
        """The message of a whole chat answer."""
        collected = ChatAnswer(self._limit)
        for _ in collected.take(answer):
            pass
        return messages_answer.message(collected)

    def events(self) -> MessageEvents:
        """Those of a streamed one."""
        return MessageEvents(self._limit)


class Messages:
    """The routes."""

    def __init__(self, serve: Serve, render: RenderPrompt) -> None:
        self._endpoint = DialectEndpoint(serve, _begin)
        self._render = render

    def routes(self, prefix: str) -> list[Route]:
        """Its routes below a prefix that ends with /v1."""
        return [
            Route(f"{prefix}/messages", self._endpoint, methods=["POST"]),
            Route(f"{prefix}/messages/count_tokens", self._count, methods=["POST"]),
        ]

    async def _count(self, request: Request) -> JSONResponse:
        body = checked(request_parsing.decode_object(await request.body()))
        chat = messages_request.translate(body, counts=True).chat
        answer: dict[str, Any] = {"input_tokens": len(await self._render(chat))}
        return JSONResponse(answer)


def _begin(body: Body) -> MessagesTranslation:
    return MessagesTranslation(messages_request.translate(body))
