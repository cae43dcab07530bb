"""Pretend engines that take their time: `python -m tests.runtime.timed_engine SECONDS SOCKET [SOCKET …]`.

A question is `{"rollout": name, "turn": number}` as text; what is answered and after how long depend on these
alone, so whoever asked knows both (`text_of`, `seconds_of`). Ids are letters, so turns go on id for id. Says
`ready`, ends with stdin, and then says what it has seen: one JSON object.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

Message = dict[str, Any]
_ROLES = {"system": 256, "user": 257, "assistant": 258}
_END = 259
_LETTERS = 400


def text_of(rollout: str, turn: int) -> str:
    """What is answered there."""
    seed = hashlib.sha256(f"{rollout}/{turn}".encode()).hexdigest()
    return f"{rollout} {turn} {seed * (_LETTERS // len(seed))}"


def seconds_of(rollout: str, turn: int, mean: float) -> float:
    """How long the answer takes: from half the mean to one and a half."""
    seed = hashlib.sha256(f"{turn}/{rollout}".encode()).digest()
    return mean * (0.5 + int.from_bytes(seed[:4]) / 2**32)


def _said(message: Message) -> list[int]:
    return [_ROLES[message["role"]], *message["content"].encode(), _END]


def _rendered(messages: list[Message]) -> list[int]:
    return [*(token for message in messages for token in _said(message)), _ROLES["assistant"]]


class TimedEngines:
    """Several engines of one process, by their place; what has happened at each of them."""

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._in_flight: Counter[int] = Counter()
        self._homes: dict[str, int] = {}
        self.most: Counter[int] = Counter()
        self.most_together = self.asked = self.moved = 0

    def application(self, place: int) -> web.Application:
        async def chat(request: web.Request) -> web.Response:
            return await self._chat(place, await request.json())

        application = web.Application(client_max_size=1 << 26)
        application.add_routes(
            [
                web.get("/health", _well),
                web.get("/v1/models", _models),
                web.post("/collective_rpc", _sampling),
                web.post("/tokenize", _tokenize),
                web.post("/v1/chat/completions/render", _render),
                web.post("/v1/chat/completions", chat),
            ]
        )
        return application

    async def _chat(self, place: int, asked: Message) -> web.Response:
        question = json.loads(asked["messages"][-1]["content"])
        rollout, turn = question["rollout"], question["turn"]
        self.asked += 1
        self.moved += self._homes.get(rollout, place) != place
        self._homes[rollout] = place
        self._in_flight[place] += 1
        self.most[place] = max(self.most[place], self._in_flight[place])
        self.most_together = max(self.most_together, self._in_flight.total())
        try:
            await asyncio.sleep(seconds_of(rollout, turn, self._mean))
        finally:
            self._in_flight[place] -= 1
        return web.json_response(_answer(asked["messages"], text_of(rollout, turn)))


def _answer(messages: list[Message], text: str) -> Message:
    message = {"role": "assistant", "content": text}
    prompt, ids = _rendered(messages), _said(message)[1:]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": [{"token": "?", "logprob": -1.0, "bytes": []} for _ in ids]},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    return {"id": "c", "model": "base", "choices": [choice], "prompt_token_ids": prompt}


async def _well(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "base", "max_model_len": 1 << 16}]})


async def _sampling(_: web.Request) -> web.Response:
    return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})


async def _tokenize(request: web.Request) -> web.Response:
    return web.json_response({"tokens": list((await request.json())["prompt"].encode())})


async def _render(request: web.Request) -> web.Response:
    return web.json_response({"token_ids": _rendered((await request.json())["messages"])})


async def _serve(mean: float, sockets: list[Path]) -> None:
    engines = TimedEngines(mean)
    for place, socket in enumerate(sockets):
        runner = web.AppRunner(engines.application(place))
        await runner.setup()
        await web.UnixSite(runner, str(socket), backlog=4096).start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    seen = {"asked": engines.asked, "most_together": engines.most_together, "moved": engines.moved}
    print(json.dumps(seen | {"most_of_each": [engines.most[place] for place in range(len(sockets))]}))


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
