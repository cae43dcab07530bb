"""1,000 rollouts in flight through relay and gateway: nothing lost, their memory, the latency they add.

    PYTHONPATH=. python -m tests.bench.in_flight [--rollouts 1000] [--turns 4]     (the runtime's environment)

Relay and gateway are real and processes of their own, as a run has them; the engines are pretend ones, so
that what an answer says and when it is due are known. Every rollout asks a turn, waits for its answer, asks
the next; all begin at once. The same load goes straight to an engine, to the gateway, and through the relay,
one after the other. Prints one JSON object, leaves nothing, and ends with 1 where anything was lost.
- `lost`, on each way: answers that did not come or were not those of the turn; rollouts whose samples are
  not one received for each turn, each going on from the one before.
- `late_ms`: how long after the engine's own time an answer is with its program: p50 and p99, of the turns
  that all ask at the same moment (`first`) and of the others (`later`). `added_ms`: less the engine's own.
- `peak_mib`: the most memory a process has had, by the kernel's word; `idle_mib`: before the first request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from runtime.gateway.samples.samples import SampleStore
from runtime.shared import process_table
from runtime.shared.schema import ROLLOUT_HEADER
from tests.runtime.gateway_process import TOKEN, Gateway
from tests.runtime.timed_engine import seconds_of, text_of
from tests.support.relay_process import RelayProcess
from tests.support.waiting import wait_until

TINY_MODEL = Path(__file__).resolve().parents[2] / "runtime" / "tiny" / "model"
ENGINES = 2
RECEIPTS_SECONDS = 60.0
IDLE_SECONDS = 2.0
CHAT = "/v1/chat/completions"
SYSTEM = "You look after a garden. " * 20


@dataclass
class Way:
    """One way to the engines, and what programs saw on it. `name` is a part of its rollouts' names."""

    name: str
    root: str
    socket: Path | None = None
    wrong: list[str] = field(default_factory=list)
    # Seconds after an answer was due, by turn.
    late: dict[int, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, float] = field(default_factory=dict)

    async def ask(self, rollouts: int, turns: int, mean: float) -> None:
        """All rollouts, at once, to their ends."""
        socket = self.socket
        # As the relay's own: closed before the gateway closes it, under a request that is on its way.
        bounds: dict[str, Any] = {"limit": 0, "keepalive_timeout": IDLE_SECONDS}
        connector = aiohttp.UnixConnector(str(socket), **bounds) if socket else aiohttp.TCPConnector(**bounds)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            names = [f"{self.name}-{number}" for number in range(rollouts)]
            await asyncio.gather(*(self._rollout(session, name, turns, mean) for name in names))

    async def _rollout(self, session: aiohttp.ClientSession, name: str, turns: int, mean: float) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            messages.append({"role": "user", "content": json.dumps({"rollout": name, "turn": turn})})
            begun = time.perf_counter()
            said = await self._turn(session, name, messages)
            late = time.perf_counter() - begun - seconds_of(name, turn, mean)
            if said != text_of(name, turn):
                self.wrong.append(f"{name}/{turn}: {said[:200]}")
                return
            self.late.setdefault(turn, []).append(late)
            messages.append({"role": "assistant", "content": said})

    async def _turn(self, session: aiohttp.ClientSession, name: str, messages: list[dict[str, str]]) -> str:
        body = {"model": "policy" if self.name != "engine" else "base", "messages": messages}
        try:
            async with session.post(
                f"{self.root}{CHAT}", json=body, headers={ROLLOUT_HEADER: name}
            ) as answer:
                said = await answer.json()
                return said["choices"][0]["message"]["content"] if answer.status == 200 else str(said)
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"


@contextmanager
def engines(sockets: list[Path], mean: float, seen: dict[str, Any]) -> Iterator[None]:
    """Pretend ones; `seen` gets what they say at their end."""
    command = [sys.executable, "-m", "tests.runtime.timed_engine", str(mean), *map(str, sockets)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        said, _ = process.communicate(timeout=60)
        seen.update(json.loads(said or "{}"))


def not_whole(state: Path, way: Way, rollouts: int, turns: int) -> list[str]:
    """The rollouts that are not a sample for each turn, received, each going on from the one before."""
    store = SampleStore(state / "samples")
    wrong = []
    for name in (f"{way.name}-{number}" for number in range(rollouts)):
        refs = store.of_rollout(name)
        exchanges = [store.load(ref) for ref in refs]
        chain = [said.conversation.continues if said.conversation else None for said, _ in exchanges]
        if len(refs) != turns or chain != [None, *(sample.id for _, sample in exchanges[:-1])]:
            wrong.append(name)
    return wrong


def memory_mib(pid: int, word: str) -> float:
    """`VmHWM`: the most it has had. `VmRSS`: what it has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(word)) / 1024, 1)


def percentiles(late: list[float]) -> dict[str, float]:
    found = statistics.quantiles(late, n=100)
    return {"p50": round(1000 * found[49], 1), "p99": round(1000 * found[98], 1)}


def lateness(way: Way) -> dict[str, dict[str, float]]:
    later = [seconds for turn, found in way.late.items() if turn for seconds in found]
    return {"first": percentiles(way.late[0]), "later": percentiles(later)}


def report(
    ways: list[Way], lost: dict[str, list[str]], seen: dict[str, Any], memory: dict[str, Any]
) -> dict[str, Any]:
    late = {way.name: lateness(way) for way in ways}
    added = {
        name: {
            when: {at: round(value - late["engine"][when][at], 1) for at, value in found.items()}
            for when, found in whens.items()
        }
        for name, whens in late.items()
        if name != "engine"
    }
    return {
        "bench": "in_flight",
        "lost": {name: len(found) for name, found in lost.items()},
        "first_lost": [one for found in lost.values() for one in found][:3],
        "late_ms": late,
        "added_ms": added,
        "cpu_ms_per_request": {way.name: way.cpu_ms for way in ways if way.cpu_ms},
        "engines": seen,
        **memory,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }


def measure(way: Way, options: argparse.Namespace, pids: dict[str, int]) -> None:
    before = {name: process_table.cpu_seconds([pid]) for name, pid in pids.items()}
    asyncio.run(way.ask(options.rollouts, options.turns, options.seconds))
    requests = options.rollouts * options.turns
    used = {name: process_table.cpu_seconds([pid]) - before[name] for name, pid in pids.items()}
    way.cpu_ms = {name: round(1000 * seconds / requests, 2) for name, seconds in used.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="an answer takes as long, on average")
    options = parser.parse_args()
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        state = Path(folder) / "state"
        *sockets, straight = [Path(folder) / f"{place}.sock" for place in range(ENGINES + 1)]
        state.mkdir()
        with engines([*sockets, straight], options.seconds, seen):
            gateway = Gateway(state, sockets[0], TINY_MODEL, engines=ENGINES)
            for place, socket in enumerate(sockets[1:], 1):
                gateway.point_to(socket, place)
            relay = RelayProcess(gateway.until_ready().socket, TOKEN, Path(folder) / "said")
            pids = {"gateway": gateway.process.pid, "relay": relay.pid}
            try:
                memory: dict[str, Any] = {"idle_mib": {it: memory_mib(pids[it], "VmRSS") for it in pids}}
                ways = [
                    Way("engine", "http://x", straight),
                    Way("gateway", "http://x", gateway.socket),
                    Way("relay", relay.url),
                ]
                for way in ways:
                    measure(way, options, pids if way.name == "relay" else {})
                memory["peak_mib"] = {it: memory_mib(pids[it], "VmHWM") for it in pids}
                # The relay says a while later what was received.
                whole = options.rollouts, options.turns
                with contextlib.suppress(AssertionError):
                    wait_until(lambda: not not_whole(state, ways[-1], *whole), RECEIPTS_SECONDS)
                lost = {way.name: [*way.wrong, *not_whole(state, way, *whole)] for way in ways[1:]}
                lost["engine"] = ways[0].wrong
            finally:
                relay.stop()
                gateway.stop()
    print(json.dumps(report(ways, lost, seen, memory)))
    return 1 if any(lost.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
