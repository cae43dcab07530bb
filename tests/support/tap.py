"""A tap on an engine's Unix socket: passes bytes both ways and keeps them. No code of the runtime is in it.

It listens where the engine did, goes on to the engine under another name, and takes the place again of an
engine that starts anew (which binds its socket seconds before it listens, so nothing gets past).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Heard:
    """One completion that was asked for; `answer` None: the engine never finished its answer."""

    body: dict[str, Any]
    answer: dict[str, Any] | None


@dataclass
class Connection:
    """The bytes of one connection."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


class Tap:
    """Between `socket` and the engine that will listen there; the folder must take three more names.

    Start it before the engine: what was connected earlier would go past it.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._engine = socket.with_suffix(".real")
        self._own = socket.with_suffix(".tap")
        self._connections: list[Connection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Tap:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def stop(self) -> None:
        """Give the engine its place back."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def heard(self, path: str = "/v1/chat/completions") -> list[Heard]:
        """Every request to the path, in the order of the connections, with the whole answer it got."""
        found = []
        for connection in list(self._connections):
            answers = iter(_messages(bytes(connection.received)))
            for line, body in _messages(bytes(connection.sent)):
                answer = next(answers, None)
                if line.split(b" ")[1] == path.encode():
                    well = answer is not None and _status(answer[0]) == 200
                    found.append(Heard(json.loads(body), json.loads(answer[1]) if answer and well else None))
        return found

    async def _open(self) -> None:
        await asyncio.start_unix_server(self._serve, self._own)
        self._watcher = asyncio.create_task(self._watch())

    async def _close(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the run has ended, and taken its sockets with it
            _put(self._engine, self._socket)
        await end_tasks()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                if self._socket.stat().st_ino != self._own.stat().st_ino:
                    self._take_place()

    def _take_place(self) -> None:
        _put(self._socket, self._engine)
        _put(self._own, self._socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_engine, to_engine = await asyncio.open_unix_connection(self._engine)
        except OSError:
            writer.close()
            return
        connection = Connection()
        self._connections.append(connection)
        with contextlib.suppress(asyncio.CancelledError):  # the tap is stopped
            await asyncio.gather(
                _pump(reader, to_engine, connection.sent),
                self.pass_answers(from_engine, writer, connection.received),
            )

    async def pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
    ) -> None:
        """What the engine says, as it says it."""
        await _pump(reader, writer, kept)


def _put(source: Path, name: Path) -> None:
    """Give a socket another name, in one step: nobody finds the name missing."""
    fresh = name.with_suffix(".new")
    os.link(source, fresh)
    os.rename(fresh, name)


async def end_tasks() -> None:
    """Cancel everything else on this loop, and wait for it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            kept += piece
            writer.write(piece)
            await writer.drain()
    writer.close()


def _status(line: bytes) -> int:
    """The status in an answer's first line."""
    return int(line.split(b" ")[1])


def _messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The whole HTTP/1.1 messages of one direction, as (first line, body); what was cut off is left out."""
    while data:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.split(b"\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (one.partition(b":") for one in lines)
        }
        if headers.get(b"transfer-encoding") == b"chunked":
            body, rest = _unchunked(rest)
        else:
            length = int(headers.get(b"content-length", 0))
            body, rest = (rest[:length], rest[length:]) if len(rest) >= length else (None, b"")
        if body is None:
            return
        yield first, body
        data = rest


def _unchunked(data: bytes) -> tuple[bytes | None, bytes]:
    body = b""
    while True:
        size, found, data = data.partition(b"\r\n")
        if not found or len(data) < int(size, 16) + 2:
            return None, b""
        body += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            return body, data
