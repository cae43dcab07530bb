"""The relay: an HTTP proxy on 127.0.0.1 between programs and the runtime's gateway.

    program → http://127.0.0.1:7453 → Unix socket (here, or an ssh forward's end) → gateway

It stamps each request with an id and, when the link or the gateway is lost before an answer has begun, sends
it again with the same id: the gateway answers a known id from its store, so a lost connection causes neither
an error nor a second sample. The waiting is bounded: then 503 with Retry-After.
Neighbours: `run.py` starts and stops it; `relay_rules.py` has the rules, `relay_connection.py` holds the
connections, `relay_body.py` reads, `relay_forward.py` forwards, `relay_receipts.py` reports which answers
arrived, `page_routes.py` shows the run to browsers. A request shows the run's token before anything of its
body is read (G30). Under `--arbor` or `--art` a program of this same user (`relay_peers.py`) needs none: the
token replaces any key that it sent, which goes no further. Everything else goes through untouched. Knows
nothing of models or steps.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import HttpVersion10, HttpVersion11, web

from launcher.base import timeout_budget
from launcher.base.errors import PreflightError
from launcher.base.failpoints import failpoint
from launcher.proxy import page_routes, relay_rules
from launcher.proxy.page_routes import Page, PageRoutes
from launcher.proxy.relay_body import BODY_BYTES as BODY_BYTES
from launcher.proxy.relay_body import BodyError, read_body
from launcher.proxy.relay_connection import RelayConnection, RelayServer, log
from launcher.proxy.relay_forward import REQUEST_HEADER, Forwarder, RelayCounters, RelayedRequest
from launcher.proxy.relay_receipts import FOLLOWS, RECEIPT_HEADER, Receipts
from launcher.records.endpoint import DEFAULT_PORT, other_port_hint
from runtime.shared import open_files

HOST = "127.0.0.1"
# How many ports after the default are tried before the system chooses one.
_PORTS = 64
_PROBE_PERIOD_SECONDS = 2.0
_PROBE_SECONDS = 5.0
_MAX_PROBES = 15
# For the runtime's status on the page.
_STATUS_SECONDS = 2.0
_STOP_SECONDS = 2.0
# For pages to hear how the run has ended.
_END_SECONDS = 3.0
_KEYLESS_RULE = "Without the run's key, only programs of the user who started it are served, no browser."
# The last receipts, when the relay closes.
_LAST_RECEIPTS_SECONDS = 2.0


@dataclass(frozen=True)
class RelayStats:
    """The relay's state now. `latency_ms` is the median time of the last health answers, end to end."""

    requests: int
    active: int
    replays: int
    refused: int
    given_up: int
    connected: bool
    latency_ms: float | None
    last_error: str | None


class Relay:
    """The relay of one run.

    `port` None: 7453, or the next free one; a number: that one or PreflightError. `token` None: every request
    passes to the gateway, which asks for the token itself. `keyless_option`: the option of `launch` by which
    this user's programs need no token. `page`: the run's page for browsers that `launch open` lets in.
    """

    def __init__(
        self,
        socket: Path,
        port: int | None = None,
        replay_seconds: float = timeout_budget.MIN_SECONDS,
        token: str | None = None,
        keyless_option: str | None = None,
        page: Page | None = None,
    ) -> None:
        self._page = (
            PageRoutes(page, token, self._status, lambda: asdict(self.stats())) if page and token else None
        )
        self._socket = socket
        self._wanted_port = port
        self._replay_seconds = replay_seconds
        self._token = token
        self._keyless_by = keyless_option
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._counters = RelayCounters()
        self._latencies_ms: deque[float] = deque(maxlen=_MAX_PROBES)
        self._answered_at = time.monotonic()
        self._connected = False
        # Closed to programs.
        self._ending = False

    def start(self) -> int:
        """Open the port and return it. Raises PreflightError when the port is taken."""
        open_files.raise_limit()
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(timeout=10)
        except BaseException:  # a Ctrl-C too: the thread must not outlive a port that did not open
            self._end_loop()
            raise

    def stop(self) -> None:
        """Close the port; requests in progress are abandoned. Bounded, and harmless when repeated."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=_STOP_SECONDS + 5)
        self._end_loop()

    def close_to_programs(self) -> None:
        """Close the port, but to pages that wait to hear how the run ends: `show_end` tells them."""
        if self._page is None or not self._page.waiting or not self._thread.is_alive():
            self.stop()
            return
        self._page.forget_token()
        self._loop.call_soon_threadsafe(self._end_requests)

    def show_end(self) -> None:
        """Tell the pages that wait how the run has ended, and close the port. Bounded, as `stop`."""
        if self._page is not None and self._page.waiting and self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                told = asyncio.run_coroutine_threadsafe(self._page.show_end(), self._loop)
                told.result(timeout=_END_SECONDS)
        self.stop()

    def _end_requests(self) -> None:
        self._ending = True
        self._prober.cancel()
        self._forwarder.close()

    def stats(self) -> RelayStats:
        """The relay's state; may be called from any thread."""
        latencies = list(self._latencies_ms)
        return RelayStats(
            **asdict(self._counters),
            connected=self._connected,
            latency_ms=statistics.median(latencies) if latencies else None,
        )

    # ------------------------------------------------------------- opening and closing

    async def _open(self) -> int:
        self._loop.set_exception_handler(_log_failure)
        # No cookies, no decompression, no limit, no total time: the content is the gateway's business. An
        # idle connection is closed before uvicorn closes it (5 s), so that it is not lost in use.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
        )
        self._receipts = Receipts(self._session)
        self._forwarder = Forwarder(self._session, self._receipts, self._counters, self._replay_seconds)
        server = RelayServer(
            self._handle, self._count_refusal, lambda lost: self._receipts.add(lost, "doubtful")
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=_STOP_SECONDS)
        await self._runner.setup()
        port = await self._listen()
        self._prober = asyncio.create_task(self._probe_for_ever())
        failpoint("relay.opened")
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
                why = f"{os.strerror(error.errno or 0)}: another run may be using it"
                continue
            return self._runner.addresses[0][1]
        await self._close_session()
        next_free = "leave out --port to use the next free one"
        hint = other_port_hint(candidates[-1], self._keyless_by) if self._keyless_by else next_free
        raise PreflightError(f"cannot use port {self._wanted_port} on {HOST}", why, hint)

    async def _close(self) -> None:
        self._prober.cancel()
        self._forwarder.close()
        await self._close_session()
        if self._page:
            self._page.close()

    async def _close_session(self) -> None:
        await self._runner.cleanup()
        await self._receipts.flush(_LAST_RECEIPTS_SECONDS)
        self._receipts.close()
        await self._session.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    # ------------------------------------------------------------- one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request's answer, a refusal in the form of its route."""
        return relay_rules.in_form_of(request.raw_path, await self._answer(request))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Everything that happens to one request."""
        connection = request.protocol
        assert isinstance(connection, RelayConnection)
        connection.answered = None
        refused = self._refused_head(request)
        if refused is None and self._page and page_routes.is_page_path(request.raw_path):
            return await self._answer_page(self._page, request, connection)
        if refused is None and self._ending:
            refused = self._refuse(410, "the run has ended", "ended")
        refused = refused or self._refused(request, connection)
        if refused is not None:
            return refused
        try:
            needs_token = relay_rules.needs_token(request.raw_path)
            body = await read_body(request) if needs_token else b""
        except BodyError as error:
            return self._refuse(error.status, str(error), error.code)
        failpoint("relay.read")
        self._counters.requests += 1
        self._counters.active += 1
        try:
            return await self._forward(request, body)
        finally:
            self._counters.active -= 1

    async def _answer_page(
        self, page: PageRoutes, request: web.BaseRequest, connection: RelayConnection
    ) -> web.StreamResponse:
        answer = await page.answer(request, connection.authenticate)
        if answer.status in (401, 403):
            self._count_refusal()
        return answer

    async def _status(self) -> dict[str, Any] | None:
        """The runtime's own status; None if it does not answer at once."""
        headers = {"Authorization": f"Bearer {self._token}", "Host": "localhost"}
        bound = aiohttp.ClientTimeout(total=_STATUS_SECONDS)
        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):  # a TimeoutError too
            url = "http://gateway/slipway/status"
            async with self._session.get(url, headers=headers, timeout=bound) as answer:
                return await answer.json() if answer.status == 200 else None
        return None

    def _refused_head(self, request: web.BaseRequest) -> web.StreamResponse | None:
        """The answer to a request that is not allowed, with or without the token."""
        if request.version not in (HttpVersion10, HttpVersion11):
            return self._refuse(400, "this endpoint speaks HTTP/1.1 and 1.0", "bad_request")
        if not relay_rules.is_text(request.headers, request.raw_path):
            return self._refuse(400, "the request's headers are not text", "bad_request")
        if reason := relay_rules.refusal(request.headers, request.raw_path):
            return self._refuse(403, reason, "refused_by_relay")
        return None

    def _refused(self, request: web.BaseRequest, connection: RelayConnection) -> web.StreamResponse | None:
        """The answer to a request without the right to enter, before anything of a body is read."""
        reason = self._token and relay_rules.without_token(request.headers, self._token)
        if not reason:
            connection.authenticate()
        elif relay_rules.needs_token(request.raw_path):
            return self._refused_without_token(request, connection, reason)
        return None

    def _refused_without_token(
        self, request: web.BaseRequest, connection: RelayConnection, reason: str
    ) -> web.StreamResponse | None:
        """The answer to a request without the token; None for a program that needs none."""
        if not self._keyless_by:
            return self._refuse(401, reason, "invalid_api_key")
        if relay_rules.is_from_browser(request.headers) or not connection.is_this_users:
            return self._refuse(401, f"{reason} {_KEYLESS_RULE}", "invalid_api_key")
        head = request.method, request.raw_path, request.headers
        if unfit := relay_rules.browser_refusal(*head, request.body_exists):
            return self._refuse(415, unfit, "unsupported_media_type")
        connection.authenticate()
        return None

    def _refuse(self, status: int, message: str, code: str) -> web.StreamResponse:
        self._count_refusal()
        return relay_rules.error(status, message, code, closes=True)

    def _count_refusal(self) -> None:
        self._counters.refused += 1

    async def _forward(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        headers = relay_rules.end_to_end_headers(request.headers)
        # One, where a client sent two: the gateway and the receipt would not mean the same.
        headers[REQUEST_HEADER] = headers.get(REQUEST_HEADER) or uuid.uuid4().hex
        headers["Host"] = "localhost"
        relay_rules.with_authorization(headers)
        if self._keyless_by and self._token:
            relay_rules.with_token(headers, self._token)
        headers[RECEIPT_HEADER] = FOLLOWS
        return await self._forwarder.answer(RelayedRequest(request, headers, body))

    # ------------------------------------------------------------- health

    async def _probe_for_ever(self) -> None:
        """Measure the latency to the gateway; end attempts on a gateway that did not answer for the whole
        bound."""
        bound = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        while True:
            begun = time.monotonic()
            try:
                async with self._session.get("http://gateway/healthz", timeout=bound) as answer:
                    await answer.read()
                    self._connected = answer.status == 200
            except (aiohttp.ClientError, OSError) as error:
                self._connected = False
                self._counters.last_error = str(error) or f"no answer in {_PROBE_SECONDS:.0f} s"
            now = time.monotonic()
            if self._connected:
                self._answered_at = now
                self._latencies_ms.append(1000 * (now - begun))
            elif now - self._answered_at > self._replay_seconds:
                self._forwarder.cancel_attempts(self._answered_at)
            await asyncio.sleep(max(0.0, _PROBE_PERIOD_SECONDS - (now - begun)))


def _log_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nothing awaited, instead of printing it on the terminal."""
    log.error("the relay: %s", context["message"], exc_info=context.get("exception"))
