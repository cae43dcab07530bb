"""One token on every route but `/healthz`, checked before anything else.

It comes in `Authorization`, in the `api-key` of Azure's clients, or in the `x-api-key` of Anthropic's.

Neighbours: gateway.py wraps its whole application in it, so that an unlisted route is refused too.
"""

from __future__ import annotations

import hmac
import re
from typing import Any

from runtime.gateway.http.openai_errors import ApiError

OPEN_PATHS = frozenset({"/healthz"})
_KEY_HEADERS = (b"api-key", b"x-api-key")
_PARTS = re.compile(rb"[/?&=]")
_MISPLACED = "the API key is in the URL, where logs would show it: send it only in the Authorization header"


class BearerAuth:
    """ASGI middleware: 401 as an OpenAI error object without the token; the compare takes constant time."""

    def __init__(self, app: Any, token: bytes) -> None:
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._app = app
        self._token = token
        self._expected = b"Bearer " + token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._open(scope)):
            if scope["type"] == "http" and self._is_token_in_url(scope):
                await ApiError(400, _MISPLACED, code="api_key_in_address").send(send)
                return
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refusal(scope).send(send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _open(self, scope: dict[str, Any]) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        return hmac.compare_digest(_authorization(scope), self._expected)

    def _is_token_in_url(self, scope: dict[str, Any]) -> bool:
        """Whether an authorised client has put the token into the address, as a rollout for one; journals and
        logs would keep it.

        Never checked for open paths: the answer would tell a right guess from a wrong one.
        """
        address = scope["path"].encode(errors="replace") + b"?" + scope.get("query_string", b"")
        return scope["path"] not in OPEN_PATHS and self._token in _PARTS.split(address)


def _authorization(scope: dict[str, Any]) -> bytes:
    """The header, its scheme spelled as we do: the case of it means nothing (RFC 9110, 11.1). Where there is
    none, another vendor's in that form."""
    headers = dict(reversed(scope["headers"]))
    if (value := headers.get(b"authorization")) is None:
        key = next((headers[name] for name in _KEY_HEADERS if name in headers), None)
        return b"" if key is None else b"Bearer " + key
    scheme, _, credentials = value.partition(b" ")
    return b"Bearer " + credentials.strip() if scheme.lower() == b"bearer" else value


def _refusal(scope: dict[str, Any]) -> ApiError:
    message = "Incorrect API key provided." if _authorization(scope) else "You didn't provide an API key."
    return ApiError(401, message, code="invalid_api_key")
