"""The one door for programs: an HTTP proxy on 127.0.0.1 in front of the runtime's gateway.

    program → http://127.0.0.1:7453 → Unix socket (here, or an ssh forward's end) → gateway

It stamps each request with an id and, when the link or the gateway is lost before an answer has begun, asks
again with the same id: the gateway answers an id it has seen from its store, so a lost connection makes
neither an error nor a second sample. The waiting is bounded: then 503 with Retry-After.
Neighbours: `run.py` starts and stops it, `relay_rules.py` says what may pass. It holds no token: what a
program sends as Authorization goes through untouched. Knows nothing of models or steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import statistics
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from launcher import open_files, relay_rules
from launcher.endpoint import DEFAULT_PORT
from launcher.errors import PreflightError
from launcher.failpoints import passing

HOST = "127.0.0.1"
# How many ports after the default are tried before the system chooses one.
_PORTS = 64
REQUEST_HEADER = "x-slipway-request"
REPLAY_SECONDS = 120.0
BODY_BYTES = 64 * 1024 * 1024
# An answer up to this size is held back until it is whole, so that it can be asked for again; a longer one
# and a stream of events pass through as they come.
_HELD_BYTES = 16 * 1024 * 1024
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_PROBE_PERIOD_SECONDS = 2.0
_PROBE_SECONDS = 5.0
_PROBES_KEPT = 15
_STOP_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True)
class RelayStats:
    """The door as it is now. `latency_ms` is the median time of the last health answers, end to end."""

    requests: int
    active: int
    replays: int
    refused: int
    given_up: int
    connected: bool
    latency_ms: float | None
    last_error: str | None


class _LostError(Exception):
    """The gateway went away, or asked to be asked again, before its answer began."""

    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds


class Relay:
    """The door of one run. `port` None: 7453, or the next free one; a number: that one or PreflightError."""

    def __init__(self, socket: Path, port: int | None = None, replay_seconds: float = REPLAY_SECONDS) -> None:
        self._socket = socket
        self._wanted_port = port
        self._replay_seconds = replay_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._requests = self._active = self._replays = self._refused = self._given_up = 0
        self._latencies_ms: deque[float] = deque(maxlen=_PROBES_KEPT)
        self._answered_at = time.monotonic()
        self._connected = False
        self._last_error: str | None = None
        self._attempts: set[asyncio.Task[web.StreamResponse]] = set()
        self._closing = False

    def start(self) -> int:
        """Open the door; its port. Raises PreflightError when the port is taken."""
        open_files.raise_limit()
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(timeout=10)
        except BaseException:  # a Ctrl-C too: the thread must not outlive a door that did not open
            self._end_loop()
            raise

    def stop(self) -> None:
        """Close the door; requests under way are given up. Bounded, and harmless when repeated."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=_STOP_SECONDS + 5)
        self._end_loop()

    def stats(self) -> RelayStats:
        """How the door is doing; may be asked from any thread."""
        latencies = list(self._latencies_ms)
        return RelayStats(
            requests=self._requests,
            active=self._active,
            replays=self._replays,
            refused=self._refused,
            given_up=self._given_up,
            connected=self._connected,
            latency_ms=statistics.median(latencies) if latencies else None,
            last_error=self._last_error,
        )

    # ------------------------------------------------------------- opening and closing

    async def _open(self) -> int:
        # No cookies, no decompression, no limit, no total time: what passes is the gateway's business. An
        # idle connection is let go before uvicorn closes it (5 s), so that it is not lost in use.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
        )
        application = web.Application(client_max_size=BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        # A client that hangs up cancels its handler, which closes the connection to the gateway.
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=_STOP_SECONDS,
        )
        await self._runner.setup()
        port = await self._listen()
        self._prober = asyncio.create_task(self._probe_for_ever())
        passing("relay.opened")
        return port

    async def _listen(self) -> int:
        if self._wanted_port is not None:
            candidates = [self._wanted_port]
        else:
            candidates = [*range(DEFAULT_PORT, DEFAULT_PORT + _PORTS), 0]
        why = ""
        for port in candidates:
            site = web.TCPSite(self._runner, HOST, port, backlog=1024)
            try:
                await site.start()
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                why = f"{os.strerror(error.errno)}: perhaps another run listens there"
                continue
            return self._runner.addresses[0][1]
        await self._close_session()
        raise PreflightError(
            f"port {self._wanted_port} on {HOST} cannot be had",
            why,
            "leave --port out to take the next free one",
        )

    async def _close(self) -> None:
        self._closing = True
        self._prober.cancel()
        for attempt in list(self._attempts):
            attempt.cancel()
        await self._close_session()

    async def _close_session(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    # ------------------------------------------------------------- one request

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Everything that happens to one request."""
        reason = relay_rules.refusal(request.headers, request.raw_path)
        if reason is not None:
            self._refused += 1
            return relay_rules.error(403, reason, "refused_by_relay")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            self._refused += 1
            return relay_rules.error(413, f"a request has at most {BODY_BYTES} bytes", "too_large")
        headers = relay_rules.passed_on(request.headers)
        headers.setdefault(REQUEST_HEADER, uuid.uuid4().hex)
        headers["Host"] = "localhost"
        passing("relay.read")
        self._requests += 1
        self._active += 1
        try:
            return await self._ask_until_answered(request, headers, body)
        finally:
            self._active -= 1

    async def _ask_until_answered(
        self, request: web.Request, headers: CIMultiDict[str], body: bytes
    ) -> web.StreamResponse:
        bound = time.monotonic() + self._replay_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._attempt(request, headers, body)
            except _LostError as error:
                self._last_error = str(error)
                wait_seconds = max(pause_seconds, min(error.after_seconds, _LONGEST_PAUSE_SECONDS))
                if self._closing or time.monotonic() + wait_seconds > bound:
                    self._given_up += 1
                    return relay_rules.error(
                        503,
                        f"the runtime has not answered for {self._replay_seconds:.0f} s: {error}",
                        "runtime_unreachable",
                        _RETRY_AFTER_SECONDS,
                    )
            passing("relay.replaying")
            self._replays += 1
            await asyncio.sleep(wait_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    async def _attempt(
        self, request: web.Request, headers: CIMultiDict[str], body: bytes
    ) -> web.StreamResponse:
        """One try, which `_probe_for_ever` may end when the gateway has stood still for too long."""
        attempt = asyncio.ensure_future(self._ask(request, headers, body))
        self._attempts.add(attempt)
        try:
            return await attempt
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # our client hung up, or the door closes
            raise _LostError("the gateway stands still") from None
        finally:
            self._attempts.discard(attempt)
            attempt.cancel()

    async def _ask(self, request: web.Request, headers: CIMultiDict[str], body: bytes) -> web.StreamResponse:
        try:
            async with self._session.request(
                request.method,
                URL(f"http://gateway{request.raw_path}", encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
            ) as upstream:
                passing("relay.forwarded")
                retry_after = upstream.headers.get("Retry-After")
                if upstream.status == 503 and retry_after is not None:
                    text = (await upstream.text(errors="replace"))[:200]
                    raise _LostError(text or "503", float(retry_after) if retry_after.isdigit() else 1.0)
                if _streams(upstream):
                    return await self._stream(request, upstream)
                whole = await upstream.read()
                passing("relay.answered")
                return web.Response(
                    status=upstream.status,
                    reason=upstream.reason,
                    headers=relay_rules.passed_on(upstream.headers),
                    body=whole,
                )
        except (aiohttp.ClientError, OSError) as error:
            raise _LostError(str(error) or type(error).__name__) from error

    async def _stream(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on as it comes. Until its first piece is here it may still be asked for again."""
        pieces = upstream.content.iter_any()
        piece = await anext(pieces, b"")
        headers = relay_rules.passed_on(upstream.headers)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        try:
            await response.prepare(request)
            while piece:
                await response.write(piece)
                passing("relay.streaming")
                piece = await anext(pieces, b"")
            await response.write_eof()
        except (aiohttp.ClientError, OSError):
            # What has begun cannot begin again: break the connection, or a cut answer would look whole.
            if request.transport is not None:
                request.transport.abort()
        return response

    # ------------------------------------------------------------- health

    async def _probe_for_ever(self) -> None:
        """Measure the way to the gateway; end attempts on one that has stood still for the whole bound."""
        bound = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        while True:
            begun = time.monotonic()
            try:
                async with self._session.get("http://gateway/healthz", timeout=bound) as answer:
                    await answer.read()
                    self._connected = answer.status == 200
            except (aiohttp.ClientError, OSError) as error:
                self._connected = False
                self._last_error = str(error) or f"no answer in {_PROBE_SECONDS:.0f} s"
            now = time.monotonic()
            if self._connected:
                self._answered_at = now
                self._latencies_ms.append(1000 * (now - begun))
            elif now - self._answered_at > self._replay_seconds:
                for attempt in list(self._attempts):
                    attempt.cancel()
            await asyncio.sleep(max(0.0, _PROBE_PERIOD_SECONDS - (now - begun)))


def _streams(upstream: aiohttp.ClientResponse) -> bool:
    """Whether an answer is to be passed on as it comes: events, or more than is held back."""
    length = upstream.content_length
    return upstream.content_type == "text/event-stream" or (length is not None and length > _HELD_BYTES)
