"""One client's connection to the relay: its answer to malformed bytes, its time limits, its end.

A connection that never shows the run's token lives for seconds, and there are only so many of them (G30).
Neighbours: `relay.py` serves through a `RelayServer` and reports when a request showed the token;
`relay_peers.py` tells which user's program is at the other end; `relay_forward.py` marks a connection with
its last answer. Knows HTTP's framing, nothing of the gateway.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from launcher.base.log import LOGGER
from launcher.proxy import relay_peers, relay_rules

log = LOGGER.getChild("relay")

# A connection that has not shown the token by then is closed, whatever it is doing.
UNAUTHENTICATED_SECONDS = 10.0
# So many of them at a time; one more closes the oldest. More than the queue of a listening socket holds, so
# that clients who come all at once, while the relay stood still, are all served.
MAX_UNAUTHENTICATED = 2048
_IDLE_SECONDS = 600.0
# Further data from a refused client is discarded for so long, so that the client can read the reason.
_LINGERING_SECONDS = 5.0
_TOO_LARGE = "the request's head is too large: a line may have 8,190 bytes, the head 128 headers"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class RelayConnection(web.RequestHandler):
    """One connection. `answered`: the id of the answer handed over last, until the next request begins."""

    def __init__(self, server: RelayServer, **options: Any) -> None:
        super().__init__(server, **options)
        self._relay_server = server
        self._clock: asyncio.TimerHandle | None = None
        self._is_malformed = False
        # Of the request whose head came last.
        self._body: StreamReader = EMPTY_PAYLOAD
        self.answered: str | None = None

    @functools.cached_property
    def is_this_users(self) -> bool:
        """Whether a program of our own user is at the other end; looked up once, when first asked."""
        if self.transport is None:
            return False
        own, peer = (self.transport.get_extra_info(end) for end in ("sockname", "peername"))
        return bool(own and peer) and relay_peers.is_this_users(own, peer)

    def authenticate(self) -> None:
        """Stop counting its time: it showed the token, or needs none, or has ended."""
        self._relay_server.unproven.pop(self, None)
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)  # drained means: the kernel has it all
        self._relay_server.unproven[self] = None
        self._clock = self._loop.call_later(UNAUTHENTICATED_SECONDS / 2, self._age, False)
        if len(self._relay_server.unproven) > MAX_UNAUTHENTICATED:
            next(iter(self._relay_server.unproven)).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.authenticate()
        if exc is not None and self.answered is not None:
            self._relay_server.on_reset(self.answered)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_malformed:
            return  # no bytes follow; each piece would be kept as another error
        queued = len(self._messages)
        try:
            super().data_received(data)
        except ValueError:  # bytes the parser itself did not expect
            self.abort()
        for message, body in itertools.islice(self._messages, queued, None):
            if isinstance(message, RawRequestMessage):
                self._body = body
                continue
            self._is_malformed = True
            if not self._body.is_eof():  # its reader would wait for the rest
                self._body.set_exception(web.RequestPayloadError("malformed"))

    def abort(self) -> None:
        """Close it now; unsent data is lost."""
        self.authenticate()
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are no request, and to a bug of ours; `message` may hold those bytes."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        if status >= 500:
            log.error("the relay failed on a request", exc_info=exc)
            return relay_rules.error(500, "the relay failed on this request", "relay_failed", closes=True)
        self._relay_server.on_malformed()
        if _is_too_large(exc):
            return relay_rules.error(431, _TOO_LARGE, "request_header_fields_too_large", closes=True)
        return relay_rules.error(400, "this is not a well-formed HTTP request", "bad_request", closes=True)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Into the run's log, by its type alone: its message may hold a client's bytes."""
        log.warning("a connection ended by %s", type(kw.get("exc_info")).__name__)

    def _age(self, is_old: bool) -> None:
        """Close it after two turns of the loop's timer: after this computer slept, requests that arrived
        meanwhile are read between them."""
        if is_old:
            self.abort()
        else:
            self._clock = self._loop.call_later(UNAUTHENTICATED_SECONDS / 2, self._age, True)


class RelayServer(web.Server):
    """Makes the connections. `on_reset(id)`: a connection broke after that answer, before another request."""

    def __init__(
        self, handler: Handler, on_malformed: Callable[[], None], on_reset: Callable[[str], None]
    ) -> None:
        # A client that hangs up cancels its handler, which closes the connection to the gateway.
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=_IDLE_SECONDS,
            lingering_time=_LINGERING_SECONDS,
            logger=log,
        )
        self.on_malformed = on_malformed
        self.on_reset = on_reset
        # In the order they came.
        self.unproven: dict[RelayConnection, None] = {}

    def __call__(self) -> RelayConnection:
        return RelayConnection(self, loop=self._loop, **self._kwargs)


def _is_too_large(error: BaseException | None) -> bool:
    """Whether a head was refused for its size: aiohttp has a class for a long line, only a text for many
    headers."""
    many = isinstance(error, HttpProcessingError) and error.message.startswith("Too many headers")
    return many or isinstance(error, LineTooLong)


def peer_state(transport: asyncio.BaseTransport | None) -> Literal["open", "closed", "reset"]:
    """The other end's state, as far as the kernel knows now; "reset" also if the connection is over.

    The event loop may not have looked yet: after this computer slept, an answer and its program's close
    arrive together. An end that closes with unread data, or before it came, resets. The kernel reports a
    reset only once: a later look, also the event loop's, finds the connection closed.
    """
    if transport is None or transport.is_closing():
        return "reset"
    watched = transport.get_extra_info("socket")
    # The very descriptor: a copy is refused if no more files may be open. Its kind is passed in, because some
    # systems refuse to tell it after a reset.
    looking = socket.socket(watched.family, watched.type, watched.proto, watched.fileno())
    try:
        if looking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # after an end, reading does not report it
            return "reset"
        return "open" if looking.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else "closed"
    except BlockingIOError:
        return "open"
    except OSError:
        return "reset"
    finally:
        looking.detach()
