"""Tells the gateway which answers reached their programs: an answer that no program received is no sample
(C52).

The gateway hands an answer to the relay, and only the relay sees whether the program was still there. So it
marks the requests it forwards (`FOLLOWS`), and such an answer becomes a sample with its receipt. A connection
that broke after its answer makes that answer doubtful: if the same call comes again, the later one counts.
Receipts are sent in their order, together if there are many, again after a loss, and all of them before a
request that gives rewards.
Neighbours: `relay_forward.py` adds them; the gateway's receipts.py takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import aiohttp

from launcher.base.log import LOGGER

log = LOGGER.getChild("relay")

RECEIPT_HEADER = "x-slipway-receipt"
FOLLOWS = "follows"
_URL = "http://gateway/slipway/receipts"
_MAX_BATCH = 1024
_ANSWER_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 2.0

State = Literal["received", "doubtful"]


class Receipts:
    """The receipts to send, in order. Used from the relay's event loop alone."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._waiting: list[tuple[str, State]] = []
        self._added = self._told = 0
        self._progress = asyncio.Condition()
        self._teller: asyncio.Task[None] | None = None
        # The token as a program showed it: a program that got an answer showed the right one.
        self._authorization = ""

    def add(self, request_id: str, state: State, authorization: str | None = None) -> None:
        """Send it soon. `authorization`: that of the request."""
        self._authorization = authorization or self._authorization
        self._waiting.append((request_id, state))
        self._added += 1
        if self._teller is None or self._teller.done():
            self._teller = asyncio.create_task(self._send_all())

    async def flush(self, seconds: float) -> bool:
        """Wait until everything added before this call is sent; whether it was within `seconds`."""
        last = self._added
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._progress:
                await self._progress.wait_for(lambda: self._told >= last)
        return self._told >= last

    def close(self) -> None:
        """Send no more."""
        if self._teller is not None:
            self._teller.cancel()

    async def _send_all(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while batch := self._waiting[:_MAX_BATCH]:
            if not await self._send(batch):
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
                continue
            pause_seconds = _FIRST_PAUSE_SECONDS
            del self._waiting[: len(batch)]
            async with self._progress:
                self._told += len(batch)
                self._progress.notify_all()

    async def _send(self, batch: list[tuple[str, State]]) -> bool:
        """Whether the gateway has them, or will never take them."""
        receipts = [{"request": request_id, "state": state} for request_id, state in batch]
        try:
            async with self._session.post(
                _URL,
                json={"receipts": receipts},
                headers={"Authorization": self._authorization, "Host": "localhost"},
                timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS),
            ) as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError):  # a TimeoutError too
            return False
        if 400 <= answer.status < 500:
            log.error("the gateway takes no receipts: %d", answer.status)
        return answer.status < 500
