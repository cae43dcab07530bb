"""A real engine, killed at named instants: an answer is given all the same, once, and the version stays.

The gateway in front is the real one too. The supervisor's part, starting the engine again, is played here.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.adapters import commit, write_adapter
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.engines import Engine
from tests.runtime.failpoints import arm, instants
from tests.runtime.gateway_process import Gateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SEQUENCE = random.Random(5).choices(range(3, 800), k=40)


@pytest.fixture
def armed(tmp_path: Path) -> Path:
    return tmp_path / "armed"


@pytest.fixture
def engine(tmp_path: Path, armed: Path) -> Iterator[Engine]:
    one = Engine(tmp_path, armed)
    one.start()
    one.until_ready()
    yield one
    one.close()


@pytest.fixture
def gateway(engine: Engine, tmp_path: Path) -> Iterator[Gateway]:
    one = Gateway(tmp_path, engine.socket, TINY_MODEL).until_ready()
    yield one
    one.stop()


def recorded(gateway: Gateway, rollout: str) -> list[dict[str, Any]]:
    return [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]


def test_killed_at_every_named_instant_an_engine_costs_no_answer_no_sample_and_no_version(
    engine: Engine, gateway: Gateway, armed: Path, tmp_path: Path
) -> None:
    while_answering = ["engine.accepted", "engine.answering"]
    while_publishing = ["engine.loading", "engine.verifying"]
    others = {"engine.starting", "engine.streaming"}
    assert {*while_answering, *while_publishing, *others} == instants("engine")

    for name in while_answering:
        headers = {"x-slipway-request": f"request-{name}"}
        arm(armed, f"{name}:kill9")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gateway.chat, name, headers, max_tokens=8, ignore_eos=True)
            assert engine.ended() == -9, name
            engine.start()
            answer = asked.result(120)
        assert answer.status_code == 200, answer.text
        assert gateway.chat(name, headers, max_tokens=8, ignore_eos=True).json() == answer.json()
        (line,) = recorded(gateway, name)
        assert len(line["samples"]) == 1 and len(line["samples"][0]["completion_ids"]) == 8

    # A server that is put off sends several tokens in one piece: of so many there are three pieces at least.
    streamed = {"stream": True, "max_tokens": 400, "ignore_eos": True}
    arm(armed, "engine.streaming@3:kill9")
    with pytest.raises(httpx.TransportError):  # a cut answer looks cut
        gateway.chat("cut", {"x-slipway-request": "cut"}, **streamed)
    assert engine.ended() == -9 and recorded(gateway, "cut") == []
    arm(armed, "engine.starting:kill9")
    engine.start()
    assert engine.ended() == -9
    engine.start()
    whole = gateway.chat("cut", {"x-slipway-request": "cut"}, **streamed)
    assert whole.text.endswith("data: [DONE]\n\n") and len(recorded(gateway, "cut")) == 1

    for version, name in enumerate(while_publishing, start=1):
        adapter = write_adapter(tmp_path / f"adapter-{version}", TINY_MODEL, seed=version)
        commit(tmp_path / "checkpoints", TINY_MODEL, adapter, version=version, sequence=SEQUENCE, prompt=20)
        gateway.stop()
        arm(armed, f"{name}:kill9")
        gateway.start()  # it serves what is committed
        engine.ended()  # its core was killed, so it ends
        assert not armed.exists()
        if version == 2:
            served = gateway.status()["version"]
            assert served == 1, "until the new version is proven the old one stays"
        engine.start()
        wait_until(lambda version=version: gateway.status()["version"] == version)
        assert gateway.chat("after").json()["model"] == f"policy@v{version}"

    os.kill(engine.pid, signal.SIGKILL)  # at no instant in particular, idle
    assert engine.ended() == -9
    engine.start()
    assert gateway.chat("last").json()["model"] == "policy@v2"
