"""A request's body, read within bounds: of its size, of the silence between two pieces, of the whole time.

Neighbours: `relay.py` reads one once its client has shown the token, never before. Knows nothing of a body's
content.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

# The gateway takes no more.
BODY_BYTES = 32 * 1024 * 1024
_IDLE_SECONDS = 60.0
_TOTAL_SECONDS = 600.0


class BodyError(Exception):
    """The body was not read. `status` and `code` are the answer's; the message repeats nothing of the
    request."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def read_body(request: web.BaseRequest) -> bytes:
    """The whole body; a client that waits to be asked for it is asked. Raises BodyError."""
    if (request.content_length or 0) > BODY_BYTES:
        raise _too_large()
    await _send_continue(request)
    try:
        async with asyncio.timeout(_TOTAL_SECONDS):
            return await _read(request)
    except TimeoutError as error:
        raise BodyError(408, "the body did not arrive in time", "request_timeout") from error
    except web.RequestPayloadError as error:
        raise BodyError(400, "the body is not well-formed", "bad_request") from error


async def _read(request: web.BaseRequest) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not request.content.at_eof():
        async with asyncio.timeout(_IDLE_SECONDS):
            part = await request.content.readany()
        size += len(part)
        if size > BODY_BYTES:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


async def _send_continue(request: web.BaseRequest) -> None:
    """RFC 9110, 10.1.1."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise BodyError(417, "the only supported Expect is 100-continue", "expectation_failed")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # no part of the answer


def _too_large() -> BodyError:
    return BodyError(413, f"a request may have at most {BODY_BYTES} bytes", "too_large")
