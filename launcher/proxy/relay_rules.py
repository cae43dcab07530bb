"""The relay's rules for requests it accepts, headers it forwards, and refusals.

Neighbours: `relay.py` asks. Pure functions on headers; knows nothing of sockets or of retries. Its messages
repeat nothing of the request: a token may stand anywhere in it.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from runtime.shared.anthropic_errors import in_anthropics_form, is_messages_route

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
# RFC 9110, 7.6.1: these belong to one connection, not to the message.
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
# Ours to set for the next connection.
_OWN_HEADERS = frozenset({"host", "content-length", "expect"})
# The gateway answers this path without a token.
_OPEN_PATH = "/healthz"
_STEPS = "/slipway/steps"
# Which samples some answers are, by their words: the client then names them in a step.
_LOOKUP = "/slipway/samples/lookup"
# The one route that OpenAI's SDK posts a form to.
_FILES = "/v1/files"
_WRITING = frozenset({"POST", "PUT", "PATCH"})
# Headers that only a browser sends (Fetch metadata), beside Origin.
_BROWSER_HEADER_PREFIX = "sec-fetch-"
# Azure's and Anthropic's headers for the key, which count where there is no Authorization.
_OTHER_KEYS = ("Api-Key", "X-Api-Key")
# Headers in which a client shows its own keys for other services; the run's token replaces them.
_KEYS = ("Authorization", "Cookie", *_OTHER_KEYS, "OpenAI-Organization", "OpenAI-Project")


def refusal(headers: Mapping[str, str], target: str) -> str | None:
    """The reason a request may not pass: it is for another host (DNS rebinding), or from another site's
    page."""
    if _host_name(f"//{headers.get('Host', '')}") not in LOOPBACK:
        return "this endpoint answers only to 127.0.0.1 and localhost"
    origin = headers.get("Origin")
    if origin is not None and _host_name(origin) not in LOOPBACK:
        return "web pages of other sites may not use this endpoint"
    if not target.startswith("/"):
        return "this endpoint is not a general proxy"
    return None


def is_text(headers: Mapping[str, str], target: str) -> bool:
    """Whether a request's head can be passed on; bytes that are no text are lone surrogates in it."""
    try:
        "".join((target, *headers.values())).encode()
    except UnicodeEncodeError:
        return False
    return target.isascii()


def needs_token(target: str) -> bool:
    """Whether a path needs the token; one that does not has no body."""
    return target != _OPEN_PATH


def without_token(headers: Mapping[str, str], token: str) -> str | None:
    """The error for a request without the token; None if it has it."""
    given = _authorization(headers)
    if given is None:
        return "You didn't provide an API key."
    scheme, _, key = given.strip().partition(" ")
    key_bytes = key.strip().encode(errors="surrogateescape")
    shown = hmac.compare_digest(key_bytes, token.encode()) and scheme.lower() == "bearer"
    return None if shown else "Incorrect API key provided."


def is_from_browser(headers: Mapping[str, str]) -> bool:
    """Whether a web page may be behind a request: then the user did not start it."""
    return "Origin" in headers or any(name.lower().startswith(_BROWSER_HEADER_PREFIX) for name in headers)


def browser_refusal(method: str, target: str, headers: Mapping[str, str], has_body: bool) -> str | None:
    """The error for a body without the token that a web page could post by itself; None for other
    requests."""
    content_type = headers.get("Content-Type")
    if method not in _WRITING or (content_type is None and not has_body):
        return None
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return None
    if kind == "multipart/form-data" and unquote(target.partition("?")[0]) == _FILES:
        return None
    return "without the run's key this endpoint takes application/json only"


def _authorization(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or another vendor's key in that form."""
    given = headers.get("Authorization")
    key = next((headers[name] for name in _OTHER_KEYS if name in headers), None)
    return f"Bearer {key}" if given is None and key is not None else given


def with_authorization(headers: CIMultiDict[str]) -> None:
    """Write another vendor's key as the Authorization header, which the receipts repeat."""
    given = _authorization(headers)
    for name in _OTHER_KEYS:  # one beside Authorization is for another service
        headers.popall(name, None)
    if given is not None and "Authorization" not in headers:
        headers["Authorization"] = given


def with_token(headers: CIMultiDict[str], token: str) -> None:
    """Replace any key in the headers by the run's own token."""
    for name in _KEYS:
        headers.popall(name, None)
    headers["Authorization"] = f"Bearer {token}"


def names_samples(method: str, target: str) -> bool:
    """Whether a request names samples: the receipts of answers must reach the gateway before it."""
    path = unquote(target.partition("?")[0])
    return method == "POST" and path in (_STEPS, _LOOKUP)


def _host_name(address: str) -> str:
    """The host of an address; "" where it has none or is not one."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # such as an open bracket
        return ""


def end_to_end_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of the message, in their order, without those of the connection."""
    named = {name.strip().lower() for line in headers.getall("Connection", []) for name in line.split(",")}
    dropped = _HOP_BY_HOP | _OWN_HEADERS | named
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in dropped)


def error(
    status: int, message: str, code: str, retry_after_seconds: int | None = None, *, closes: bool = False
) -> web.StreamResponse:
    """An answer of the relay's own, in the form every OpenAI client understands; `closes` the connection."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    answer = web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": code}},
        status=status,
        headers={"Retry-After": str(retry_after_seconds)} if retry_after_seconds else None,
    )
    if closes:
        answer.force_close()
    return answer


def in_form_of(target: str, answer: web.StreamResponse) -> web.StreamResponse:
    """A refusal of the relay's own in the form that clients of this route read."""
    is_ours = isinstance(answer, web.Response) and not answer.prepared and answer.status >= 400
    if not is_ours or not is_messages_route(unquote(target.partition("?")[0])):
        return answer
    assert isinstance(answer, web.Response)
    try:
        parsed = json.loads(answer.text or "")
        given = parsed["error"] | {}
    except (ValueError, KeyError, TypeError):  # an error of nobody's form
        return answer
    if parsed.get("type") != "error":  # the gateway's own has its form
        answer.text = json.dumps(in_anthropics_form(answer.status, given))
    return answer
