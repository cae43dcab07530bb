"""A real engine behind a door that can be tampered with: what is between a gateway and its engine goes wrong.

Everything passes to the engine and back, unless a `Fault` says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

LOAD = "/v1/load_lora_adapter"
VERIFY = "/collective_rpc"
SCORE = "/v1/completions"
CHAT = "/v1/chat/completions"
Body = dict[str, Any]


@dataclass
class Fault:
    """What goes wrong on the way. The keys are paths.

    `rewrite`: the body the engine gets instead; None: it gets nothing, and 200 is answered.
    `refuse`: the status and text answered in its place. `silent`: no answer at all. `die`: the connection
    breaks, and so does every other until `away` health checks have failed.
    """

    rewrite: dict[str, Callable[[Body], Body | None]] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    die: frozenset[str] = frozenset()
    away: int = 0


class TamperedEngine:
    """Listens on a Unix socket of its own; `fault` may be exchanged at any time."""

    def __init__(self, engine: Path) -> None:
        self._engine = engine
        self._folder = Path(tempfile.mkdtemp(prefix="slip-"))
        self.socket = self._folder / "engine-0.sock"
        self.fault = Fault()
        # Paths asked, in order.
        self.asked: list[str] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._wait(self._start())

    def close(self) -> None:
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        shutil.rmtree(self._folder)

    def ask(self, path: str, body: Body) -> Any:
        """Ask the engine itself."""
        return self._wait(self._forward("POST", path, json.dumps(body).encode()))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._engine), limit=0))
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fault, path = self.fault, request.path
        self.asked.append(path)
        content = await request.read()
        if path in fault.die or (fault.away and not fault.die):
            self._break(request)
        if path in fault.silent:
            await asyncio.Event().wait()
        if path in fault.refuse:
            status, text = fault.refuse[path]
            return web.json_response({"error": {"message": text}}, status=status)
        if path in fault.rewrite:
            body = fault.rewrite[path](json.loads(content))
            if body is None:
                return web.Response(text="ok")
            content = json.dumps(body).encode()
        status, answer = await self._forward(request.method, path, content)
        return web.Response(status=status, body=answer, content_type="application/json")

    def _break(self, request: web.Request) -> None:
        """Close the connection as a process that was killed does; it is away for a few looks."""
        fault = self.fault
        fault.die = frozenset()
        if request.path == "/health":
            fault.away -= 1
        assert request.transport is not None
        request.transport.abort()

    async def _forward(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        async with self._session.request(method, f"http://x{path}", data=content, headers=headers) as answer:
            return answer.status, await answer.read()
