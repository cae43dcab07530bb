"""What the relay adds to a request: `python -m tests.bench.relay_latency` (launcher's environment, 2 s).

Prints one JSON object: p50 of requests one after the other, straight to a gateway's socket and through the
relay, in milliseconds. The gateway answers at once.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from launcher.proxy.relay import Relay
from tests.support.upstream import Upstream

REQUESTS = 500
CHAT = "/v1/chat/completions"
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


async def measure(socket: Path, port: int) -> dict[str, float]:
    """Both ways, warmed up."""
    straight = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)))
    through = aiohttp.ClientSession()
    async with straight, through:
        ways = {"straight": (straight, "http://x"), "relay": (through, f"http://127.0.0.1:{port}")}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(REQUESTS):
            for name, (session, root) in ways.items():
                begun = time.perf_counter()
                async with session.post(f"{root}{CHAT}", json=BODY) as answer:
                    await answer.read()
                if number >= REQUESTS // 10:
                    times[name].append(1000 * (time.perf_counter() - begun))
    return {f"{name}_ms": round(statistics.median(seen), 2) for name, seen in times.items()}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        gateway = Upstream(Path(folder) / "gateway.sock")
        gateway.start()
        relay = Relay(gateway.socket, 0)
        try:
            print(json.dumps(asyncio.run(measure(gateway.socket, relay.start()))))
        finally:
            relay.stop()
            gateway.close()


if __name__ == "__main__":
    main()
