"""A tap on an engine's socket that puts noise on the logprobs of what was sampled, as bf16 would (tap.py).

Only a chat answer's own are changed. What an engine says of a text that it is given, for the proofs of an
admission or a publication, passes as it is: these bound a mismatch, and are no part of what is asked here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

from tests.support.tap import Tap


class NoisyTap(Tap):
    """`deviation`: of the noise, in nats, on each sampled token by itself."""

    def __init__(self, socket: Path, deviation: float, seed: int) -> None:
        super().__init__(socket)
        self._deviation = deviation
        self._random = random.Random(seed)
        # How many tokens have it.
        self.tokens = 0

    async def pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
    ) -> None:
        """One whole answer after the other; one in pieces passes as it comes."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = _length(head)
                if size is None:
                    await _pass_pieces(head, reader, writer)
                    continue
                body = self._changed(await reader.readexactly(size))
                writer.write(_with_length(head, len(body)) + body)
                await writer.drain()
        writer.close()

    def _changed(self, body: bytes) -> bytes:
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        choices: list[dict[str, Any]] = answer.get("choices") or [] if isinstance(answer, dict) else []
        sampled = [token for it in choices if "message" in it for token in (it["logprobs"] or {})["content"]]
        for token in sampled:
            token["logprob"] += self._random.gauss(0, self._deviation)
        self.tokens += len(sampled)
        return json.dumps(answer).encode() if sampled else body


def _length(head: bytes) -> int | None:
    """None: the body comes in pieces."""
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))


def _with_length(head: bytes, size: int) -> bytes:
    lines = [it for it in head.rstrip().split(b"\r\n") if not it.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"content-length: %d" % size, b"", b""])


async def _pass_pieces(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head)
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line, 16)
        writer.write(line + await reader.readexactly(size + 2))
        await writer.drain()
        if size == 0:
            return
