"""`launch bench` alone: what a request costs on each way, and the lines that are made of it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from launcher.bench import slipway_side
from launcher.bench.self_bench import SelfBench
from launcher.bench.side_run import SideRun, Step
from launcher.bench.workload import Workload
from launcher.client import Session
from launcher.client.wire import Endpoint, Patience

sys.path.insert(0, str(Path(slipway_side.__file__).parent / "programs"))
import request_cost

ASKED = {"rounds": 2, "concurrent": 4, "each_round": 8, "single": 3}
SLOWER_SECONDS = 0.2


@contextmanager
def three_ways(sockets: Path) -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """An engine, a gateway that is slower, and a door: its address, and what each was asked."""
    seen: dict[str, list[dict[str, Any]]] = {"direct": [], "gateway": [], "door": []}
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), list[str]()

    def app(name: str) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            if request.headers["Authorization"] != "Bearer the-key":
                return web.Response(status=401)
            seen[name].append(await request.json())
            await asyncio.sleep(SLOWER_SECONDS if name == "gateway" else 0)
            return web.json_response({})

        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        return application

    async def serve() -> None:
        sites = {
            "direct": lambda runner: web.UnixSite(runner, str(sockets / "engine-0.sock")),
            "gateway": lambda runner: web.UnixSite(runner, str(sockets / "gateway.sock")),
            "door": lambda runner: web.TCPSite(runner, "127.0.0.1", 0),
        }
        for name, site in sites.items():
            runner = web.AppRunner(app(name))
            await runner.setup()
            await site(runner).start()
            if name == "door":
                address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield address[0], seen
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.mark.process
def test_the_same_requests_go_each_way_and_are_told_apart(tmp_path: Path) -> None:
    results, sockets = tmp_path / "run" / "results", tmp_path / "sockets"
    results.mkdir(parents=True)
    sockets.mkdir()
    (results.parent / "record.json").write_text(json.dumps({"machine": {"socket_dir": str(sockets)}}))
    with three_ways(sockets) as (door, seen):
        run = Session(Endpoint(door, "the-key"), Patience(60.0, 60.0), results)
        found = request_cost.measure_routes(run, {**Workload().task(0, tmp_path), "requests": ASKED})
    each = ASKED["concurrent"] + ASKED["rounds"] * (ASKED["each_round"] + ASKED["single"])
    assert {name: len(asked) for name, asked in seen.items()} == dict.fromkeys(seen, each)
    evidence = {"logprobs": True, "return_token_ids": True}
    assert seen["direct"][0] == seen["gateway"][0] | evidence and seen["door"][0] == seen["gateway"][0]
    assert found["p50_ms"]["gateway"] - found["p50_ms"]["direct"] > 0
    assert found["p50_ms"]["gateway"] >= 1000 * SLOWER_SECONDS
    assert found["gateway_to_direct"] < 1


def run_of(added_ms: float, rate: float, publication: float, scores: tuple[float, float]) -> SideRun:
    """A whole run that was this fast."""
    measured = {
        "publication_seconds": [publication] * 40,
        "requests": {"p50_ms": {"direct": 10.0, "gateway": 10.0 + added_ms}, "gateway_to_direct": rate},
    }
    steps = tuple(Step(2.0 * (at + 1), 10.0, 1.0, 1.0) for at in range(40))
    load = {"busy_meanwhile": 0.0, "busy_before": 0.01, "load_before": 0.1, "load_after": 1.5}
    # 500 s in all, of which 400 were for what is measured beside the task.
    return SideRun("ours", 0, 500.0, 10.0, 5.0, 80.0, 5.0, scores, steps, computer=load, measured=measured)


def alone(*runs: SideRun) -> SelfBench:
    computer = {"cores": 2, "processor": "a processor", "memory_gib": 24.0}
    return SelfBench(Workload(40, len(runs)), computer, "folder", 0.1, list(runs))


def test_what_is_hoped_for_is_judged_line_by_line() -> None:
    found = alone(run_of(2.0, 0.97, 0.2, (11.7, 20.0)))
    lines = {line["what"]: (line["seen"], line["met"]) for line in found.to_dict()["lines"]}
    assert lines["from Enter to verified down"] == (100.0, True)
    assert lines["a step, of 6 to 40"] == (2.0, None)
    assert lines["held-out rise, of the range"] == (pytest.approx(8.3 / 26, abs=1e-3), True)
    assert lines["committed → served and proven, p50"] == (200.0, True)
    assert lines["gateway's rate by direct, 64 in flight"] == (0.97, True)
    assert lines["gateway's own latency, p50"] == (2.0, True)
    assert lines["launch --help"] == (0.1, True)
    assert "missed" not in found.text() and "no record" not in found.text()


def test_the_worst_run_counts_where_each_is_promised() -> None:
    found = alone(run_of(4.0, 0.9, 0.3, (11.7, 20.0)), run_of(4.0, 0.9, 0.3, (11.7, 12.0)))
    missed = [line["what"] for line in found.to_dict()["lines"] if line["met"] is False]
    assert missed == [
        "held-out rise, of the range",
        "committed → served and proven, p50",
        "gateway's rate by direct, 64 in flight",
        "gateway's own latency, p50",
    ]
