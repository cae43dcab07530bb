"""Errors in the OpenAI API's form: `{"error": {"message", "type", "param", "code"}}`.

Neighbours: every part of the gateway raises `ApiError`; gateway.py turns it, and FastAPI's refusals, into an
answer. Knows nothing of engines or steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from runtime.gateway.http import retired

# Status → the OpenAI "type" that client libraries switch on.
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
RETRY_SECONDS = 5
CONTEXT_LENGTH = "context_length_exceeded"
# vLLM 0.32's messages for it: for a text, for its ids, and for a prompt that leaves room for no token.
_TOO_LONG = re.compile(
    r"maximum context length|maximum model length|max_(completion_)?tokens must be at least 1, got 0"
)
_SLASHES = re.compile(r"/{2,}")
_ROLLOUT = re.compile(r"^/rollouts/[^/]+")
# As `re.escape` writes a route's `{name}`.
_PARAMETER = re.compile(r"\\{[^}]*\\}")
# Of a client's own words, in an error.
_MAX_SHOWN_LENGTH = 100
# Of the versions that answer, in an error.
_NAMED = 20
# Routes of OpenAI's that clients try first, and the way out.
_UNSERVED_ROUTES = {
    "/v1/v1/messages": "the path has /v1 twice: the base URL of Anthropic's clients ends without it",
    "/v1/embeddings": "the policy writes text and has no embeddings: get them from another endpoint",
}
# Those that a client without a route is told.
_MAIN_ROUTES = (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"))


class ApiError(Exception):
    """An HTTP error answer. `details` is put beside the four fields (a step's counts, for instance)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.details = details or {}

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": _TYPES.get(
                self.status, "server_error" if self.status >= 500 else "invalid_request_error"
            ),
            "param": self.param,
            "code": self.code,
            **self.details,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer, in ASGI form."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", str(self.retry_after_seconds).encode()))
        return headers

    async def send(self, send: Any) -> None:
        """Answer with this error over ASGI."""
        body = self.body()
        headers = [*self.headers(), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def not_ready(message: str, retry_after_seconds: int = RETRY_SECONDS) -> ApiError:
    """503: ask again later."""
    return ApiError(503, message, code="not_ready", retry_after_seconds=retry_after_seconds)


def unknown_model(model: str, policy: str | None = None, trained: str | None = None) -> ApiError:
    """404 in OpenAI's form, with the names there are: the policy's, and that of the model it trains."""
    message = f"The model `{model[:_MAX_SHOWN_LENGTH]}` does not exist."
    if policy is not None:
        also = f" (`{trained}` means it too)" if trained is not None else ""
        message += (
            f" This run has `{policy}`{also}. If another endpoint was meant, give that client its own base "
            "URL and key: OPENAI_BASE_URL and OPENAI_API_KEY may be this run's"
        )
    return ApiError(404, message, param="model", code="model_not_found")


def gone_model(name: str, why: str, answering: list[str]) -> ApiError:
    """404 for weights that were served under this name and are so no longer; never others in their place."""
    if len(answering) > _NAMED:
        answering = [*answering[: _NAMED - 1], "…", answering[-1]]
    message = (
        f"`{name}` {why}. Names that answer: {', '.join(answering)}. Pin a version that you keep using "
        "while it is still kept (POST /slipway/checkpoints/NAME/pin); `base` is the model before training"
    )
    return ApiError(404, message, param="model", code="model_not_found")


def reused_model(name: str, after: int | None, now: str | None) -> ApiError:
    """409 for a version's name that had, or may have had, other weights than are kept under its number."""
    message = f"`{name[:_MAX_SHOWN_LENGTH]}` may now mean different weights than when you got this name"
    if after is not None:
        message += f": the machine was lost, and version numbers after {after} were used again"
    if now is not None:
        message += f"; this number now belongs to `{now}`"
    return ApiError(409, message, param="model", code="version_reused")


def not_served(status: int, method: str, path: str, served: Sequence[tuple[str, str]]) -> ApiError:
    """404 or 405 for a route. The path is not repeated: a token that is in the wrong place is often there.

    `served`: the methods and paths of all routes, as in `("GET", "/v1/models/{model}")`.
    """
    if way := retired.way_out(path):
        return ApiError(404, way, code="retired")
    for end, hint in _UNSERVED_ROUTES.items():
        if path.endswith(end):
            return ApiError(404, hint, code="not_served")
    return ApiError(status, _meant_route(status, method, path, served), code="not_served")


def _meant_route(status: int, method: str, path: str, served: Sequence[tuple[str, str]]) -> str:
    """What is wrong with a path or method, and the route that was meant, as far as can be told."""
    if status == 405:
        routes = _routes_of(path, served)
        return f"this route does not take {method}" + (f"; use {routes}" if routes else "")
    plain = "/" + _SLASHES.sub("/", path).strip("/")
    if plain == "/health":
        return "no such route; use GET /healthz"
    if plain != path and (routes := _routes_of(plain, served)):
        return f"the path has a slash too many; use {routes}"
    without = _ROLLOUT.sub("", plain)
    if without != plain and (routes := _routes_of(without, served)):
        return f"this route is not under /rollouts/ID; use {routes}"
    if routes := _routes_of(f"{plain.removesuffix(without)}/v1{without}", served):
        return f"no such route; use {routes}. A client's base URL ends with /v1"
    main = ", ".join(f"{verb} {route}" for verb, route in _MAIN_ROUTES)
    return f"no such route; use {main}"


def _routes_of(path: str, served: Sequence[tuple[str, str]]) -> str:
    """The routes that have this path, with their methods: `GET /v1/models/{model}`."""
    return ", ".join(
        f"{method} {route.replace(':path}', '}')}"
        for method, route in served
        if re.fullmatch(_PARAMETER.sub(_parameter_pattern, re.escape(route)), path)
    )


def _parameter_pattern(parameter: re.Match[str]) -> str:
    return ".+" if ":path" in parameter[0] else "[^/]+"


def from_engine(status: int, body: bytes) -> ApiError:
    """The engine's own refusal: its message and param; a number as code is only the status again.

    A prompt past the context gets OpenAI's code, by which agents know that they must shorten it.
    """
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message, param, code = error.get("message"), error.get("param"), error.get("code")
    except (ValueError, AttributeError):
        message, param, code = body.decode(errors="replace")[:500], None, None
    text = str(message or f"the engine answered {status}")
    if status == 400 and _TOO_LONG.search(text):
        return ApiError(400, text, param=param, code=CONTEXT_LENGTH)
    return ApiError(status, text, param=param, code=code if isinstance(code, str) else None)
