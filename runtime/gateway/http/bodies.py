"""Request bodies, for every route: read whole, bounded, and decompressed if they are compressed.

Neighbours: gateway.py puts it between auth.py and the routes, so that a client without the token is not read;
schema.py has the bound, which the relay keeps as well. Knows nothing of a body's content.
"""

from __future__ import annotations

import zlib
from typing import Any

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared.schema import BODY_BYTES

_DIGITS = 12  # of a length; one with thousands of them is no number Python reads
# Content-Encoding → zlib's word for the format: a gzip member, or a zlib stream (RFC 9110, 8.4.1).
_FORMATS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class BodyReader:
    """ASGI middleware: passes each body on whole and unpacked, in one message."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            content = await _read(headers, receive)
            content = unpacked(content, headers.get(b"content-encoding", b""))
        except ApiError as error:
            await error.send(send)
            return
        await self._app(scope, _with_body(content, receive), send)


def unpacked(content: bytes, encoding: bytes) -> bytes:
    """The plain body. Raises ApiError: 413 past the bound, 415 for an unknown encoding, 400 for damaged
    data."""
    for name in reversed([part.strip().lower() for part in encoding.split(b",")]):
        if content and name not in (b"", b"identity"):
            content = _unpacked_once(content, name)
    return content


def _unpacked_once(content: bytes, name: bytes) -> bytes:
    if name not in _FORMATS:
        message = "this Content-Encoding is not supported: send the body uncompressed, or as gzip or deflate"
        raise ApiError(415, message, param="content-encoding", code="unsupported_encoding")
    reader = zlib.decompressobj(_FORMATS[name])
    try:
        plain = reader.decompress(content, BODY_BYTES + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not {name.decode()}", param="content-encoding") from error
    if len(plain) > BODY_BYTES:
        raise _too_large()
    if not reader.eof or reader.unused_data:
        raise ApiError(400, f"the body is not one complete {name.decode()}", param="content-encoding")
    return plain


async def _read(headers: dict[bytes, bytes], receive: Any) -> bytes:
    """Every byte of the body as it came; the rest of a body that is too long is not waited for."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and (len(announced) > _DIGITS or int(announced) > BODY_BYTES):
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large() -> ApiError:
    return ApiError(413, f"a request may have at most {BODY_BYTES} bytes", code="too_large")


def _with_body(content: bytes, receive: Any) -> Any:
    """`receive`, with the whole body as its first message; later messages are the connection's own."""
    first = [{"type": "http.request", "body": content, "more_body": False}]

    async def whole() -> dict[str, Any]:
        return first.pop() if first else await receive()

    return whole
