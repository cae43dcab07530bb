"""HTTP to the run's endpoint: one connection pool, bounded retries, the same request id on each try.

Neighbours: `connection.py` (our routes) and `engine.py` (chat completions) send through it. A retried request
is the same request: the gateway answers a known id with the stored answer (C6, C46), so a lost connection
causes neither an error nor a second sample. Knows nothing of steps, samples or DSPy.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx

from launcher.client.failures import EndpointLost, NotConnected
from launcher.client.request_bodies import REQUEST_HEADER

# Statuses of a temporary refusal: the link or an engine is away (502, 503, 504), the queue is full (429).
_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_INITIAL_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 8.0
_CONNECT_SECONDS = 10.0
# The launcher's own copies of these are in `launcher/base/timeout_budget.py`.
PATIENCE_VARIABLE = "LAUNCH_PATIENCE_SECONDS"
# Of a rented run with the usual lease: for a program that was given an address and nothing else.
_DEFAULT_AWAY_SECONDS = 900.0
# The runtime's own bound for the sampling of one answer.
_MAX_SAMPLING_SECONDS = 1800.0
# The run's relay takes connections while the run lives, in any state of its runtime.
_CONNECTION_REFUSED_SECONDS = 30.0


@dataclass(frozen=True)
class Endpoint:
    """Where the run answers. `root` has no `/v1`; the key never appears in a repr."""

    root: str
    api_key: str

    def __repr__(self) -> str:
        return f"Endpoint({self.root!r})"

    @property
    def is_tls(self) -> bool:
        """Whether certificates matter: reading the system's takes 50 ms, and the relay speaks plain HTTP."""
        return self.root.startswith("https:")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True)
class Patience:
    """How long to wait for one answer, and in all for an endpoint that is away.

    A client that hangs up before the run's relay does has its question asked anew: `of_run` is the patience
    that does not. Another OpenAI client wants `answer_seconds` as its time-out.
    """

    answer_seconds: float
    away_seconds: float

    @classmethod
    def of_run(cls, environ: Mapping[str, str] = os.environ) -> Patience:
        """The patience for the run this program is in. Raises NotConnected for a variable that is no number.

        The relay retries for so long after a loss. Before a step it may wait as long to deliver receipts. All
        the while the runtime may be at work on the answer.
        """
        value = environ.get(PATIENCE_VARIABLE, _DEFAULT_AWAY_SECONDS)
        try:
            seconds = float(value)
        except ValueError:
            raise NotConnected(
                f"{PATIENCE_VARIABLE} is not a number of seconds: {value}",
                hint='eval "$(launch env RUN)" sets it',
            ) from None
        return cls(_MAX_SAMPLING_SECONDS + 2 * seconds, seconds)

    @property
    def timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.answer_seconds, connect=_CONNECT_SECONDS)


def new_request_id() -> str:
    """An id the gateway has never seen."""
    return uuid.uuid4().hex


class _RetryState:
    """Counts one request's failures; returns the next pause, or that patience has ended.

    A relay that refuses connections is given up soon; an absent runtime is waited for much longer.
    """

    def __init__(self, endpoint: Endpoint, patience: Patience) -> None:
        self._root = endpoint.root
        self._seconds = patience.away_seconds
        self._since: float | None = None
        self._refused_since: float | None = None
        self._attempt = 0
        self.last_failure = "no answer"

    def pause(self, retry_after_seconds: float | None = None) -> float:
        pause = min(_INITIAL_BACKOFF_SECONDS * 2**self._attempt, _MAX_BACKOFF_SECONDS)
        pause *= 1 + random.random() / 4  # 64 threads that failed together should not come back together
        if retry_after_seconds is not None:
            pause = max(pause, min(retry_after_seconds, _MAX_BACKOFF_SECONDS))
        self._attempt += 1
        now = time.monotonic()
        if self._since is None:  # a slow answer is not an absent one: patience starts at the first failure
            self._since = now
        self._give_up_after(self._since + self._seconds, now + pause, self._seconds)
        if self._refused_since is not None:
            self._give_up_after(
                self._refused_since + _CONNECTION_REFUSED_SECONDS, now + pause, _CONNECTION_REFUSED_SECONDS
            )
        return pause

    def _give_up_after(self, deadline: float, until: float, seconds: float) -> None:
        if until > deadline:
            raise EndpointLost(
                f"No answer from the run at {self._root} for {seconds:.0f} s",
                why=self.last_failure,
                hint="`launch status` shows the run; its log says why it is gone",
            )

    def pause_after(self, response: httpx.Response) -> float | None:
        """Seconds to pause before asking again, or None when this answer stands."""
        self._refused_since = None
        if response.status_code not in _RETRYABLE_STATUSES:
            return None
        self.last_failure = f"HTTP {response.status_code}: {response.text[:300]}"
        return self.pause(_retry_after_seconds(response))

    def pause_after_error(self, error: httpx.TransportError) -> float:
        self.last_failure = f"{type(error).__name__}: {error}".rstrip(": ")
        if not _is_refused(error):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = time.monotonic()
        return self.pause()


def _is_refused(error: httpx.TransportError) -> bool:
    """Whether no process listens there, by the system error behind httpx's."""
    found: BaseException | None = error if isinstance(error, httpx.ConnectError) else None
    while found is not None and not isinstance(found, ConnectionRefusedError):
        found = found.__cause__ or found.__context__
    return found is not None


def _retry_after_seconds(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _request_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {REQUEST_HEADER: new_request_id(), **(headers or {})}


def _limits() -> httpx.Limits:
    """A connection stays until the other end closes it. httpcore 1.0 closes one that was idle for 5 s, or is
    one of too many, although it may just have given it to another thread. That thread then reads from another
    connection's descriptor, and waits for an answer that never comes."""
    return httpx.Limits(max_connections=1024, max_keepalive_connections=None, keepalive_expiry=None)


class Wire:
    """Sends from any thread. The environment's proxies are not asked: the endpoint is on this computer."""

    def __init__(self, endpoint: Endpoint, patience: Patience | None = None) -> None:
        self.endpoint = endpoint
        self.patience = patience or Patience.of_run()
        self._client = httpx.Client(
            base_url=endpoint.root,
            headers=endpoint.headers,
            timeout=self.patience.timeout,
            limits=_limits(),
            trust_env=False,
            verify=endpoint.is_tls,
        )

    def send(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The answer, with any status except a temporary refusal. Raises EndpointLost when patience ends."""
        retries = _RetryState(self.endpoint, self.patience)
        headers = _request_headers(headers)
        while True:
            try:
                response = self._client.request(method, path, content=content, headers=headers)
                pause = retries.pause_after(response)
            except httpx.TransportError as error:
                pause = retries.pause_after_error(error)
            else:
                if pause is None:
                    return response
            time.sleep(pause)


class AsyncWire:
    """The same for async programs: one pool for each event loop, as sockets belong to their loop."""

    def __init__(self, endpoint: Endpoint, patience: Patience | None = None) -> None:
        self.endpoint = endpoint
        self.patience = patience or Patience.of_run()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClient] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()  # threads with a loop each come and go

    async def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        with self._lock:
            kept = self._clients.get(loop)
            is_new = kept is None
            if kept is None:
                for ended in [other for other in self._clients if other.is_closed()]:
                    del self._clients[ended]
                kept = self._clients[loop] = _LoopClient(self._new_client())
        if is_new:
            await anext(kept.closing)  # from here on the loop knows of it
        return kept.client

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.endpoint.root,
            headers=self.endpoint.headers,
            timeout=self.patience.timeout,
            limits=_limits(),
            trust_env=False,
            verify=self.endpoint.is_tls,
        )

    async def send(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """See `Wire.send`."""
        retries = _RetryState(self.endpoint, self.patience)
        headers = _request_headers(headers)
        while True:
            try:
                response = await (await self._client()).request(
                    method, path, content=content, headers=headers
                )
                pause = retries.pause_after(response)
            except httpx.TransportError as error:
                pause = retries.pause_after_error(error)
            else:
                if pause is None:
                    return response
            await asyncio.sleep(pause)

    async def aclose(self) -> None:
        with self._lock:
            kept = self._clients.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept.client.aclose()


class _LoopClient:
    """A client that is closed when its loop shuts down its asynchronous generators, as asyncio.run does.

    A program run by `asyncio.run` for each rollout would otherwise leave its sockets to be collected.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.closing = self._close_at_the_end()

    async def _close_at_the_end(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.client.aclose()
