"""Forwards one request until the gateway has answered it, and hands the answer to the program.

Until an answer has begun, a lost request is sent again with the same id, which the gateway answers from its
store. An answer that has begun cannot begin again: a break then closes the program's connection.
Neighbours: `relay.py` lets requests in, `relay_receipts.py` tells the gateway which answers arrived. Knows
nothing of ports, tokens or health.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from launcher.base.failpoints import failpoint
from launcher.proxy import relay_rules
from launcher.proxy.relay_connection import RelayConnection, peer_state
from launcher.proxy.relay_receipts import Receipts
from runtime.shared import event_streams

REQUEST_HEADER = "x-slipway-request"
# On every answer that sampled, and so wants a receipt.
_VERSION_HEADER = "x-slipway-policy-version"
_EVENTS = "text/event-stream"
# An answer up to this size is held back until it is whole, so that it can be asked for again; a longer one
# and a stream of events pass through as they come.
_BUFFERED_BYTES = 16 * 1024 * 1024
_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 2.0
# A question that was lost only so late was being answered meanwhile. Longer than a connect may take.
_WORKED_SECONDS = 10.0
_RETRY_AFTER_SECONDS = 5


@dataclass
class RelayCounters:
    """The relay's counters."""

    requests: int = 0
    active: int = 0
    replays: int = 0
    refused: int = 0
    given_up: int = 0
    last_error: str | None = None


class UpstreamLostError(Exception):
    """The gateway went away, or requested a retry, before its answer began.

    `after_seconds`: it requested a retry after so long; None: it went away. `silent_since`: it is frozen, and
    has not answered since then (`time.monotonic`).
    """

    def __init__(
        self, reason: str, after_seconds: float | None = None, silent_since: float | None = None
    ) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds
        self.silent_since = silent_since


class RetryDeadline:
    """The remaining time that one request may go without an answer, counted from its first loss, however old
    it is.

    Time in which the gateway worked on it again is not counted, unless the gateway then requested a retry: in
    that case it waited for an engine, or lost some. Several absences add up, so that a request that kills
    every engine it reaches is given up, too.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._lost_at: float | None = None

    def record_loss(self, begun: float, now: float, error: UpstreamLostError) -> None:
        """An attempt that began then is lost now."""
        went_away = error.silent_since is None and error.after_seconds is None
        if self._lost_at is None:
            away = 0.0 if error.silent_since is None else now - max(begun, error.silent_since)
        elif went_away and now - begun >= _WORKED_SECONDS:
            away = begun - self._lost_at
        else:
            away = now - self._lost_at
        self.left -= away
        self._lost_at = now


@dataclass
class RelayedRequest:
    """One request on its way. `begun`: the answer, once its head may have reached the program. `signed`:
    whether it has a receipt, None while that is unknown, because the kernel reports a reset only once."""

    request: web.BaseRequest
    headers: CIMultiDict[str]
    body: bytes
    begun: web.StreamResponse | None = None
    signed: bool | None = None

    @property
    def id(self) -> str:
        return self.headers[REQUEST_HEADER]

    def cut(self) -> None:
        """Close the program's connection; else a broken answer would look complete."""
        if self.request.transport is not None:
            self.request.transport.abort()


class Forwarder:
    """Everything between a request that was read and its answer in the program's hands."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        receipts: Receipts,
        counters: RelayCounters,
        replay_seconds: float,
    ) -> None:
        self._session = session
        self._receipts = receipts
        self._counters = counters
        self._replay_seconds = replay_seconds
        self._attempts: set[asyncio.Task[web.StreamResponse]] = set()
        self._silent_since: float | None = None
        self._closing = False

    async def answer(self, call: RelayedRequest) -> web.StreamResponse:
        """Ask until there is an answer, and hand it over."""
        request = call.request
        if relay_rules.names_samples(request.method, request.raw_path) and not await self._receipts.flush(
            self._replay_seconds
        ):
            return self._abandon("could not tell the gateway what was received")
        response = await self._ask_until_answered(call)
        if call.begun is not None:
            return response
        call.begun = response
        was_there = peer_state(request.transport) == "open"
        try:
            await response.prepare(request)
            await response.write_eof()
            await self._sign(call, response, was_there)
            # A stream is not doubted: a client that leaves at the end of its events may leave the rest
            # unread.
            if call.signed and isinstance(request.protocol, RelayConnection):
                request.protocol.answered = call.id
        except ConnectionError:  # the program is gone: no receipt
            call.cut()
        return response

    def cancel_attempts(self, silent_since: float) -> None:
        """End every attempt: the gateway was frozen for too long."""
        self._silent_since = silent_since
        self._cancel()

    def close(self) -> None:
        """End every attempt, and begin no other."""
        self._closing = True
        self._cancel()

    def _cancel(self) -> None:
        for attempt in list(self._attempts):
            attempt.cancel()

    async def _ask_until_answered(self, call: RelayedRequest) -> web.StreamResponse:
        waiting = RetryDeadline(self._replay_seconds)
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            begun = time.monotonic()
            if self._closing:
                return self._abandon("the run has ended")
            try:
                return await self._attempt(call)
            except UpstreamLostError as error:
                self._counters.last_error = str(error)
                waiting.record_loss(begun, time.monotonic(), error)
                wait_seconds = max(pause_seconds, min(error.after_seconds or 0.0, _MAX_PAUSE_SECONDS))
                if self._closing or wait_seconds > waiting.left:
                    return self._abandon(str(error))
            failpoint("relay.replaying")
            self._counters.replays += 1
            await asyncio.sleep(wait_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def _abandon(self, reason: str) -> web.StreamResponse:
        self._counters.given_up += 1
        return relay_rules.error(
            503,
            f"the runtime has not answered for {self._replay_seconds:.0f} s: {reason}",
            "runtime_unreachable",
            _RETRY_AFTER_SECONDS,
        )

    async def _attempt(self, call: RelayedRequest) -> web.StreamResponse:
        """One try, which `cancel_attempts` may end."""
        attempt = asyncio.ensure_future(self._ask(call))
        self._attempts.add(attempt)
        try:
            return await attempt
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # our client hung up, or the relay closes
            if call.begun is not None:
                return call.begun
            raise UpstreamLostError(
                "the gateway makes no progress", silent_since=self._silent_since
            ) from None
        finally:
            self._attempts.discard(attempt)
            attempt.cancel()

    async def _ask(self, call: RelayedRequest) -> web.StreamResponse:
        try:
            async with self._session.request(
                call.request.method,
                URL(f"http://gateway{call.request.raw_path}", encoded=True),
                headers=call.headers,
                data=call.body or None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
            ) as upstream:
                failpoint("relay.forwarded")
                retry_after = upstream.headers.get("Retry-After")
                if upstream.status == 503 and retry_after is not None:
                    text = (await upstream.text(errors="replace"))[:200]
                    raise UpstreamLostError(
                        text or "503", float(retry_after) if retry_after.isdigit() else 1.0
                    )
                if _is_streamed(upstream):
                    return await self._stream(call, upstream)
                whole = await upstream.read()
                failpoint("relay.answered")
                headers = relay_rules.end_to_end_headers(upstream.headers)
                if upstream.method == "HEAD" and (length := upstream.headers.get("Content-Length")):
                    headers["Content-Length"] = length  # of the body that GET would have
                return web.Response(
                    status=upstream.status, reason=upstream.reason, headers=headers, body=whole
                )
        except (aiohttp.ClientError, OSError) as error:
            if call.begun is not None:
                return call.begun
            raise UpstreamLostError(str(error) or type(error).__name__) from error

    async def _stream(self, call: RelayedRequest, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on as it comes. Until its first piece is here it may still be asked for again."""
        pieces = upstream.content.iter_any()
        piece = await anext(pieces, b"")
        headers = relay_rules.end_to_end_headers(upstream.headers)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        call.begun = response
        was_there, end = False, b""
        try:
            await response.prepare(call.request)
            while piece:
                end = event_streams.tail(end, piece)
                is_end = event_streams.is_stream_end(end)
                if is_end or upstream.content_type != _EVENTS:
                    was_there = peer_state(call.request.transport) == "open"
                await response.write(piece)
                failpoint("relay.streaming")
                if is_end:  # some programs leave at this, before the stream has ended
                    await self._sign(call, response, was_there)
                piece = await anext(pieces, b"")
            await response.write_eof()
            await self._sign(call, response, was_there)
        except (aiohttp.ClientError, OSError):
            call.cut()
        except asyncio.CancelledError:
            call.cut()
            raise
        return response

    async def _sign(self, call: RelayedRequest, response: web.StreamResponse, was_there: bool) -> None:
        """Write the receipt of an answer that sampled, once all of it is on its way to the program.

        `was_there`: the program was, just before the end was written. Since then it may have read that, and
        closed.
        """
        if _VERSION_HEADER not in response.headers or call.signed is not None:
            return
        await call.request.writer.drain()
        call.signed = was_there and peer_state(call.request.transport) != "reset"
        if call.signed:
            self._receipts.add(call.id, "received", call.headers.get("Authorization"))


def _is_streamed(upstream: aiohttp.ClientResponse) -> bool:
    """Whether an answer is passed on as it comes: events, or an answer too large to be held back."""
    length = upstream.content_length
    return upstream.content_type == _EVENTS or (length is not None and length > _BUFFERED_BYTES)
