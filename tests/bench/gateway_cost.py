"""What the gateway costs: the same chat requests through it and straight to its engine, in one run.

    PYTHONPATH=. python tests/bench/gateway_cost.py [--model DIR] [--rounds 5]     (the runtime's environment)

Starts the whole runtime under its keeper, asks in alternating rounds, prints one JSON object, leaves nothing.
- `throughput`: requests per second, 64 in flight, median of the rounds, and its ratio to `direct`.
- `p50_ms`: median latency of single requests, one in flight; `added_ms` = gateway - direct.
`direct` asks the engine for what the gateway asks it for (token ids and logprobs: without them there is
nothing to train on); `plain` asks for neither, which no rollout can do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from runtime.shared import process_table

TINY_MODEL = Path(__file__).resolve().parents[2] / "runtime" / "tiny" / "model"
TOKEN = "token-of-the-bench"
CONCURRENT = 64
REQUESTS = 512
SINGLE = 48
START_SECONDS = 600.0

SYSTEM = """Your input fields are:
1. `english` (str):
Your output fields are:
1. `french` (str):
All interactions will be structured in the following way, with the appropriate values filled in.

[[ ## english ## ]]
{english}

[[ ## french ## ]]
{french}

[[ ## completed ## ]]
In adhering to this structure, your objective is:
        Given the fields `english`, produce the fields `french`."""
USER = """[[ ## english ## ]]
the black cat under the big table

Respond with the corresponding output fields, starting with the field `[[ ## french ## ]]`, and then ending \
with the marker for `[[ ## completed ## ]]`."""


@dataclass
class Side:
    """One way to the engine, and what was measured on it."""

    socket: Path
    body: dict[str, Any]
    throughputs: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    async def ask(self, requests: int, concurrent: int) -> tuple[float, list[float]]:
        """Requests per second, and each one's milliseconds."""
        content = json.dumps(self.body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        latencies: list[float] = []
        left = iter(range(requests))

        async def worker(session: aiohttp.ClientSession) -> None:
            for _ in left:
                started = time.perf_counter()
                async with session.post("http://x/v1/chat/completions", data=content) as answer:
                    text = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(text.decode())
                latencies.append(1000 * (time.perf_counter() - started))

        connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            started = time.perf_counter()
            await asyncio.gather(*(worker(session) for _ in range(concurrent)))
            return requests / (time.perf_counter() - started), latencies


async def measure(sides: dict[str, Side], rounds: int) -> None:
    """Alternate between the sides, so that a busy moment of the machine meets them all."""
    for side in sides.values():
        await side.ask(CONCURRENT, CONCURRENT)
    for _ in range(rounds):
        for side in sides.values():
            side.throughputs.append((await side.ask(REQUESTS, CONCURRENT))[0])
        for side in sides.values():
            side.latencies_ms += (await side.ask(SINGLE, 1))[1]


def start(folder: Path, sockets: Path, model: Path) -> subprocess.Popen[bytes]:
    """The runtime under its keeper, as a run starts it."""
    config = {
        "run_id": "bench", "model_path": str(model), "state_dir": str(folder), "socket_dir": str(sockets),
        "lease_seconds": 3600, "deadline_seconds": 3600,
    }  # fmt: skip
    (folder / "runtime.json").write_text(json.dumps(config))
    keeper = subprocess.Popen(
        [sys.executable, "-m", "runtime.keeper", "--config", str(folder / "runtime.json")],
        stdin=subprocess.PIPE,
    )
    assert keeper.stdin
    keeper.stdin.write(TOKEN.encode() + b"\n")
    keeper.stdin.close()
    return keeper


def child_pids(folder: Path) -> dict[str, int]:
    """The children by name, once all are ready. Raises TimeoutError."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            said = json.loads((folder / "supervisor.json").read_text())
        except FileNotFoundError:
            said = {"phase": "starting"}
        if said["phase"] == "ready":
            return {child["name"]: child["pid"] for child in said["children"]}
        if said["phase"] == "failed":
            raise RuntimeError(said["detail"])
        time.sleep(0.1)
    raise TimeoutError("the runtime is not ready")


def report(sides: dict[str, Side], gateway_cpu_ms: float) -> dict[str, Any]:
    throughput = {name: round(statistics.median(side.throughputs), 1) for name, side in sides.items()}
    p50_ms = {name: round(statistics.median(side.latencies_ms), 2) for name, side in sides.items()}
    pairs = zip(sides["gateway"].throughputs, sides["direct"].throughputs, strict=True)
    return {
        "bench": "gateway_cost",
        "throughput": throughput,
        # Of each round's pair, so that what slows the machine for a while weighs on both.
        "throughput_ratio": round(statistics.median(gateway / direct for gateway, direct in pairs), 3),
        "p50_ms": p50_ms,
        "added_ms": round(p50_ms["gateway"] - p50_ms["direct"], 2),
        "gateway_cpu_ms_per_request": round(gateway_cpu_ms, 2),
        "requests": {"concurrent": CONCURRENT, "each_round": REQUESTS, "single_each_round": SINGLE},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=TINY_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as sockets:
        folder = Path(state)
        keeper = start(folder, Path(sockets), options.model)
        try:
            gateway_pid = child_pids(folder)["gateway"]
            full = {
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
                "max_tokens": 20, "ignore_eos": True, "temperature": 1.0,
            }  # fmt: skip
            engine, door = Path(sockets) / "engine-0.sock", Path(sockets) / "gateway.sock"
            evidence = {"logprobs": True, "return_token_ids": True}
            sides = {
                "plain": Side(engine, full | {"model": "base"}),
                "direct": Side(engine, full | {"model": "base"} | evidence),
                "gateway": Side(door, full | {"model": "policy"}),
            }
            before = process_table.cpu_seconds([gateway_pid])
            asyncio.run(measure(sides, options.rounds))
            used = process_table.cpu_seconds([gateway_pid]) - before
            asked = CONCURRENT + options.rounds * (REQUESTS + SINGLE)
            print(json.dumps(report(sides, 1000 * used / asked)))
        finally:
            keeper.send_signal(signal.SIGTERM)
            keeper.wait(90)


if __name__ == "__main__":
    main()
