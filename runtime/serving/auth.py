"""One bearer token on every route but `/healthz`, asked before anything else is looked at.

Neighbours: gateway.py wraps its whole application in it, so that a route nobody listed is refused too.
"""

from __future__ import annotations

import hmac
from typing import Any

from runtime.serving.openai_errors import ApiError

OPEN_PATHS = frozenset({"/healthz"})


class BearerAuth:
    """ASGI middleware: 401 as an OpenAI error object without the token; the compare takes constant time."""

    def __init__(self, app: Any, token: bytes) -> None:
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._app = app
        self._expected = b"Bearer " + token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._open(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refusal(scope).send(send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _open(self, scope: dict[str, Any]) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        return hmac.compare_digest(_authorization(scope), self._expected)


def _authorization(scope: dict[str, Any]) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return value
    return b""


def _refusal(scope: dict[str, Any]) -> ApiError:
    said = "Incorrect API key provided." if _authorization(scope) else "You didn't provide an API key."
    return ApiError(401, said, code="invalid_api_key")
