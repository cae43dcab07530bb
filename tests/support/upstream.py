"""A gateway as far as the relay can see one: real HTTP on a real Unix socket, stopped and started at will.

It keeps the gateway's promise that matters to the relay: a request id it has seen gets the stored answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """`handlers` maps a path to what answers it. `seen` lists every request's id and path, in order."""

    def __init__(self, socket: Path, handlers: dict[str, Handler] | None = None) -> None:
        self.socket = socket
        self.handlers = handlers or {}
        self.seen: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.sampled: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self) -> None:
        """Listen; again after `stop`."""
        self._wait(self._start())

    def stop(self) -> None:
        """Go away as a killed gateway does: connections reset, no socket."""
        self._wait(self._stop())
        self.socket.unlink(missing_ok=True)

    def freeze(self, seconds: float) -> None:
        """Stand still, as a stopped process does: connections stay open, nothing is read."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def stand_still(self, until: threading.Event) -> None:
        """Stand still until then."""
        self._loop.call_soon_threadsafe(until.wait, 60)

    def close(self) -> None:
        """For good."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, doing: Awaitable[None]) -> None:
        async def do() -> None:
            await doing

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(timeout=60)

    async def _start(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def _stop(self) -> None:
        if self._runner is None:
            return
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/healthz":
            return web.json_response({"ok": True})
        request_id = request.headers.get("x-slipway-request", "")
        self.seen.append((request_id, request.path))
        self.headers.append(dict(request.headers))
        if request.path in self.handlers:
            return await self.handlers[request.path](request)
        body = await request.read()
        answer = self.sampled.setdefault(request_id, uuid.uuid4().hex)
        return web.json_response({"answer": answer, "bytes": len(body), "path": request.raw_path})


@contextlib.contextmanager
def upstream_in_a_folder(handlers: dict[str, Handler] | None = None) -> Iterator[Upstream]:
    """One that listens, in a folder of its own: pytest's are too deep for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        upstream = Upstream(Path(folder) / "gateway.sock", handlers)
        upstream.start()
        try:
            yield upstream
        finally:
            upstream.close()
