"""The cost of one request on three routes: through the relay, through the gateway, straight to the engine.

Neighbours: `slipway_program.py` calls it beside a run that has trained, so that all three routes reach one
engine. The routes alternate, so that a busy moment of the computer affects them all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from launcher.client import Session

_PHRASE = "the black cat under the big table"
_ANSWER_TOKENS = 20


@dataclass
class _Route:
    """One way to the engine, and the times measured on it. `socket` None: over TCP."""

    url: str
    socket: Path | None
    body: dict[str, Any]
    rates: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    async def ask(self, key: str, requests: int, concurrent: int) -> tuple[float, list[float]]:
        """Requests per second, and each one's milliseconds."""
        content, left, took = json.dumps(self.body).encode(), iter(range(requests)), list[float]()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connector = (
            aiohttp.UnixConnector(str(self.socket), limit=0) if self.socket else aiohttp.TCPConnector(limit=0)
        )

        async def worker(session: aiohttp.ClientSession) -> None:
            for _ in left:
                began = time.perf_counter()
                async with session.post(f"{self.url}/chat/completions", data=content) as answer:
                    text = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(text.decode(errors="replace"))
                took.append(1000 * (time.perf_counter() - began))

        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            began = time.perf_counter()
            await asyncio.gather(*(worker(session) for _ in range(concurrent)))
            return requests / (time.perf_counter() - began), took


def measure_routes(run: Session, task: dict[str, Any]) -> dict[str, Any]:
    """Requests a second with many in flight, and the median latency of one alone, on each way."""
    assert run.run_dir is not None  # a run of `launch`
    record = json.loads((run.run_dir.parent / "record.json").read_text(encoding="utf-8"))
    sockets = Path(record["machine"]["socket_dir"])
    messages = [
        {"role": "system", "content": task["system"]},
        {"role": "user", "content": task["user"].replace("{english}", _PHRASE)},
    ]
    sampling = {"max_tokens": _ANSWER_TOKENS, "ignore_eos": True, "temperature": 1.0}
    body = {"model": "base", "messages": messages, **sampling}
    # The gateway's request to its engine: without these there is nothing to train on.
    evidence = {"logprobs": True, "return_token_ids": True}
    ways = {
        "direct": _Route("http://engine/v1", sockets / "engine-0.sock", body | evidence),
        "gateway": _Route("http://gateway/v1", sockets / "gateway.sock", body),
        "door": _Route(run.base_url, None, body),
    }
    asyncio.run(_alternating(ways, run.api_key, task["requests"]))
    return {
        "requests_per_second": {name: round(statistics.median(way.rates), 1) for name, way in ways.items()},
        "p50_ms": {name: round(statistics.median(way.milliseconds), 2) for name, way in ways.items()},
        # For each round's pair, so that a slow moment of the computer weighs on both.
        "gateway_to_direct": round(
            statistics.median(
                through / straight
                for through, straight in zip(ways["gateway"].rates, ways["direct"].rates, strict=True)
            ),
            3,
        ),
        **task["requests"],
    }


async def _alternating(ways: dict[str, _Route], key: str, load: dict[str, int]) -> None:
    for way in ways.values():
        await way.ask(key, load["concurrent"], load["concurrent"])
    for _ in range(load["rounds"]):
        for way in ways.values():
            way.rates.append((await way.ask(key, load["each_round"], load["concurrent"]))[0])
        for way in ways.values():
            way.milliseconds += (await way.ask(key, load["single"], 1))[1]
