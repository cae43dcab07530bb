"""OpenAI's Responses API: `POST /v1/responses`, and what is kept of a response.

Neighbours: gateway.py mounts the routes, endpoint.py asks for each request's translation,
responses_request.py and responses_answer.py translate, response_store.py keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from runtime.gateway.dialects import responses_answer, responses_request
from runtime.gateway.dialects.chat_answer import ChatAnswer
from runtime.gateway.dialects.endpoint import DialectEndpoint, Serve
from runtime.gateway.dialects.response_store import ResponseStore, StoredResponse
from runtime.gateway.dialects.responses_answer import ResponseEvents
from runtime.gateway.dialects.responses_request import Body, ResponsesRequest
from runtime.gateway.http.openai_errors import ApiError

log = logging.getLogger(__name__)


class ResponsesTranslation:
    """One request and its answer."""

    def __init__(self, request: ResponsesRequest, store: ResponseStore) -> None:
        self._request = request
        self._store = store

    @property
    def translated(self) -> Body:
        """The chat request."""
        return self._request.chat

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without an effect here."""
        return self._request.ignored

    def whole(self, answer: Body) -> Body:
        """The response of a whole chat answer, kept."""
        collected = ChatAnswer(self._request.limit)
        for _ in collected.take(answer):
            pass
        self.keep(collected)
        return responses_answer.response(self._request, collected)

    def events(self) -> StoredEvents:
        """Those of a streamed one."""
        return StoredEvents(self._request, self)

    def keep(self, answer: ChatAnswer) -> None:
        """Keep it for later requests, unless that is not wanted. A full disk is no reason to lose it."""
        if not self._request.stored:
            return
        found = responses_answer.response(self._request, answer)
        stored = StoredResponse(found, self._request.given, answer.as_message(), self._request.previous)
        try:
            self._store.put(found["id"], stored)
        except OSError as error:
            log.error("response %s could not be kept: %s", found["id"], error)


class StoredEvents(ResponseEvents):
    """The events of a response that is kept before its client has all of it."""

    def __init__(self, request: ResponsesRequest, translation: ResponsesTranslation) -> None:
        super().__init__(request)
        self._translation = translation

    def end(self) -> Iterator[bytes]:
        """The last events."""
        self._translation.keep(self.answer)
        yield from super().end()


class Responses:
    """The routes."""

    def __init__(self, serve: Serve, store: ResponseStore) -> None:
        self._store = store
        self._endpoint = DialectEndpoint(serve, self._begin)

    def _begin(self, body: Body) -> ResponsesTranslation:
        name = responses_request.previous_response(body)
        earlier = None if name is None else self._store.conversation(name)
        if name is not None and earlier is None:
            message = f"Previous response with id '{name[:100]}' not found."
            code = "previous_response_not_found"
            raise ApiError(400, message, param="previous_response_id", code=code)
        return ResponsesTranslation(
            responses_request.translate(body, earlier or (), self._store.item), self._store
        )

    def routes(self, prefix: str) -> list[Route]:
        """Its routes below a prefix that ends with /v1."""
        return [
            Route(f"{prefix}/responses", self._endpoint, methods=["POST"]),
            Route(f"{prefix}/responses/{{response}}", self._kept, methods=["GET", "DELETE"]),
        ]

    async def _kept(self, request: Request) -> JSONResponse:
        name = request.path_params["response"]
        stored = self._store.get(name)
        if stored is None:
            raise ApiError(404, f"Response with id '{name[:100]}' not found.", param="response_id")
        if request.method != "DELETE":
            return JSONResponse(stored.response)
        self._store.delete(name)
        answer: dict[str, Any] = {"id": name, "object": "response", "deleted": True}
        return JSONResponse(answer)
