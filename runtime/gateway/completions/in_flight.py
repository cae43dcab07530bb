"""Requests in flight: an answer as it grows, and the connections that wait for it.

A retried request joins the one in flight, so that it makes one sample. When no connection waits any more, a
request that could be retried gets a short grace (a lost link mends within a second), any other is aborted at
once.
Neighbours: proxy.py fills one, each in a task of its own. Knows ASGI, nothing of models or samples.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from runtime.gateway.http.openai_errors import ApiError, not_ready

# A supervised tunnel is healthy again 0.75 s after it was killed.
GRACE_SECONDS = 3.0

Headers = list[tuple[bytes, bytes]]


class InFlightRequest:
    """One answer: a head, parts, an end. `digest` tells a retry from another request under the same id."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        # Asked under an id, and not yet partly handed out: a retry gets the same answer.
        self.replayable = False
        # Its answer is on disk: what remains is the delivery.
        self.recorded = False
        # A connection that was still there has all of the recorded answer.
        self.received = False
        self.status = 0
        self.headers: Headers = []
        self.parts: list[bytes] = []
        self.error: ApiError | None = None
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self._listeners: set[asyncio.Event] = set()
        self._grace: asyncio.TimerHandle | None = None

    @property
    def has_listeners(self) -> bool:
        """Someone is still connected."""
        return bool(self._listeners)

    @property
    def has_started(self) -> bool:
        """Something was already handed to the listeners: it cannot be asked again."""
        return self.status != 0

    def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers

    def write(self, part: bytes) -> None:
        self.parts.append(part)
        self._wake()

    def end(self, error: ApiError | None = None) -> None:
        """No more parts. With an error the error is the answer or, when one has begun, its last event."""
        self.error = error
        if error is not None and self.has_started:
            self.parts.append(b"data: " + error.body() + b"\n\n")
        self.ended = True
        self._wake()

    async def deliver(self, receive: Any, send: Any, grace_seconds: float) -> None:
        """Hand the whole answer, from its beginning, to one connection."""
        changed = asyncio.Event()
        self._listeners.add(changed)
        if self._grace is not None:
            self._grace.cancel()
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda _: changed.set())
        try:
            await self._send_all(changed, gone, send)
        finally:
            gone.cancel()
            self._listeners.discard(changed)
            if not self._listeners and not self.ended and self.task is not None:
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(grace_seconds, self.task.cancel)

    async def _send_all(self, changed: asyncio.Event, gone: asyncio.Future[None], send: Any) -> None:
        sent = -1  # the head comes first
        while not gone.done():
            if self.error is not None and not self.has_started:
                await self.error.send(send)
                return
            if self.has_started and sent < 0:
                await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
                sent = 0
            while 0 <= sent < len(self.parts):
                sent += 1
                more = self.error is not None or not (self.ended and sent == len(self.parts))
                await send({"type": "http.response.body", "body": self.parts[sent - 1], "more_body": more})
                # The end of the events is part of the answer, the end of the response is not.
                self.received |= self.recorded and sent == len(self.parts) and not gone.done()
                if not more:
                    return
            if self.ended and sent == len(self.parts):
                if self.error is None:
                    await send({"type": "http.response.body", "body": b""})
                # Left unfinished otherwise: the server breaks the connection, so a cut answer looks cut.
                return
            changed.clear()
            if not (self.ended or gone.done()):
                await changed.wait()

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.set()


class InFlightRequests:
    """The requests in flight, by request id."""

    def __init__(self) -> None:
        self._by_id: dict[str, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request: str) -> InFlightRequest | None:
        return self._by_id.get(request)

    def start(
        self, request: str, digest: str, work: Callable[[InFlightRequest], Awaitable[None]]
    ) -> InFlightRequest:
        """Start `work` in a task of its own; it outlives the connection that asked for it."""
        flight = self._by_id[request] = InFlightRequest(digest)
        flight.task = asyncio.create_task(self._run(request, flight, work))
        return flight

    async def _run(
        self, request: str, flight: InFlightRequest, work: Callable[[InFlightRequest], Awaitable[None]]
    ) -> None:
        try:
            await work(flight)
            flight.end()
        except ApiError as error:
            flight.end(error)
        except asyncio.CancelledError:
            flight.end(not_ready("the request was aborted: nobody waited for it", 1))
            raise
        except Exception as error:
            flight.end(ApiError(500, f"the gateway failed: {type(error).__name__}"))
            raise
        finally:
            del self._by_id[request]

    async def close(self) -> None:
        """Abort what is still in flight."""
        tasks = [flight.task for flight in self._by_id.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
