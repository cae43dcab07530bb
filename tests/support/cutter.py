"""A link that breaks: passes bytes both ways and cuts each connection after a few pieces of them.

Whether a piece was a request not yet sent on, an answer not yet handed back or half of one is chance: a cut
piece is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path

from tests.support.tap import end_tasks


class Cutter:
    """In front of `target`: a Unix socket's path, or a port of 127.0.0.1. `place` says where it listens."""

    def __init__(self, target: Path | int, listen: Path | None, seed: int, most_pieces: int = 12) -> None:
        self._target = target
        self._listen = listen
        self._random = random.Random(seed)
        self._most_pieces = most_pieces
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.cuts = 0
        self.port = 0

    def start(self) -> Cutter:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(end_tasks(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _open(self) -> None:
        if self._listen is not None:
            await asyncio.start_unix_server(self._serve, self._listen)
            return
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = (
            asyncio.open_unix_connection(self._target)
            if isinstance(self._target, Path)
            else asyncio.open_connection("127.0.0.1", self._target)
        )
        try:
            from_target, to_target = await opened
        except OSError:
            writer.transport.abort()
            return
        left = self._random.randint(1, self._most_pieces)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(OSError):
                while piece := await source.read(1 << 16):
                    left -= 1
                    if left <= 0:
                        sink.write(piece[: self._random.randrange(len(piece))])
                        break
                    sink.write(piece)
                    await sink.drain()

        pumps = [asyncio.create_task(pump(reader, to_target)), asyncio.create_task(pump(from_target, writer))]
        with contextlib.suppress(asyncio.CancelledError):  # the link is taken away
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self.cuts += left <= 0
        for task in pumps:
            task.cancel()
        for end in (writer, to_target):
            end.transport.abort()
