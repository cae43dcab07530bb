"""Connections lost at every moment, between the program and the relay and between the relay and the gateway.

The client, the relay, the gateway and the engine are the real ones; only the links are a test's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.client.wire import Endpoint, Patience, Wire
from launcher.proxy.relay import Relay
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.support.cutter import Cutter

pytestmark = pytest.mark.slow

ROLLOUTS = 96
THREADS = 16


@pytest.fixture
def gateway(engine: RunningEngine, tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path, engine.socket, engine.model).until_ready()
    yield running
    running.stop()


@pytest.mark.parametrize("where", ["relay and gateway", "program and relay"])
def test_c46_a_link_lost_mid_run_doubles_nothing_and_loses_nothing(gateway: Gateway, where: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="slip-"))  # pytest's folders are too deep for a socket's path
    socket = Path(gateway.config["socket_dir"]) / "gateway.sock"
    if where == "relay and gateway":
        link = Cutter(socket, folder / "link.sock", seed=1).start()
        relay = Relay(folder / "link.sock", 0)
        port = relay.start()
    else:
        relay = Relay(socket, 0)
        link = Cutter(relay.start(), None, seed=2).start()
        port = link.port
    wire = Wire(Endpoint(f"http://127.0.0.1:{port}", TOKEN), Patience(60, 60))

    def roll_out(number: int) -> str:
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.0}
        answer = wire.send("POST", f"/rollouts/r{number}/v1/chat/completions", json.dumps(body).encode())
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            got = list(pool.map(roll_out, range(ROLLOUTS)))
    finally:
        relay.stop()
        link.stop()
        shutil.rmtree(folder)
    assert link.cuts > ROLLOUTS / 12
    rollouts = [f"r{number}" for number in range(ROLLOUTS)]
    assert gateway.counts(*rollouts)["samples"] == ROLLOUTS
    recorded = Counter(line["tags"]["rollout"] for line in gateway.recorded())
    assert recorded == Counter(rollouts)
    said = {
        line["tags"]["rollout"]: line["answer"]["choices"][0]["message"]["content"]
        for line in gateway.recorded()
    }
    assert [said[name] for name in rollouts] == got
