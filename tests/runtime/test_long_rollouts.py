"""Long rollouts are sorted and laid into a batch beside the gateway's loop, not on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.gateway.gateway import build_app, build_components
from runtime.gateway.samples.journal import Exchange, Sample
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps import handover
from runtime.gateway.steps.rollout_log import RolloutLog
from runtime.shared.runtime_config import RuntimeConfig
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.recorded import answer, asked, choice, record
from tests.support.waiting import wait_until_async

ROLLOUTS = 8
TURNS = 10
# Tokens that each turn adds to its rollout.
TURN_TOKENS = 400
ANSWERS = 50
# Bounds a thread that is never let go on, where the test has failed meanwhile.
HELD_SECONDS = 20.0


class Gate:
    """Holds the thread that reads a sample's tokens while it is shut; the event loop's own it only notes."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.held = threading.Event()
        self.stood_on_the_loop = False
        self._over = False

    def shut(self) -> None:
        if not self._over:
            self._open.clear()

    def open(self) -> None:
        self.held.clear()
        self._open.set()

    def open_for_good(self) -> None:
        self._over = True
        self._open.set()

    def passing(self) -> None:
        if self._open.is_set():
            return
        self.held.set()
        if threading.current_thread() is threading.main_thread():
            self.stood_on_the_loop = True
            return
        self._open.wait(HELD_SECONDS)

    def shut_before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, before a gate that is shut once more."""

        def shut_first(*arguments: Any) -> Any:
            self.shut()
            return work(*arguments)

        return shut_first


def rollout(store: SampleStore, name: str) -> None:
    """Turns that each go on from the last, as an agent's do."""
    prompt = [5] * TURN_TOKENS
    for call in range(TURNS):
        ids = [7 + call] * TURN_TOKENS
        record(
            store,
            asked(rollout=name, x_slipway_call=str(call)),
            answer(prompt, choice(ids, [-0.5] * len(ids))),
        )
        prompt = [*prompt, *ids]


def test_g23_a_step_of_long_rollouts_leaves_the_gateway_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, load = Gate(), SampleStore.load

    def gated(self: SampleStore, ref: SampleRef) -> tuple[Exchange, Sample]:
        gate.passing()
        return load(self, ref)

    monkeypatch.setattr(SampleStore, "load", gated)
    monkeypatch.setattr(handover, "build", gate.shut_before(handover.build))
    monkeypatch.setattr(RolloutLog, "write", gate.shut_before(RolloutLog.write))
    names = [f"r{number}" for number in range(ROLLOUTS)]
    store = SampleStore(tmp_path / "samples")
    for name in names:
        rollout(store, name)
    config = RuntimeConfig(
        run_id="t", model_path=str(TINY_MODEL), state_dir=str(tmp_path), socket_dir=str(tmp_path)
    )
    asyncio.run(answered_to_the_end(config, names, gate))


async def answered_to_the_end(config: RuntimeConfig, names: list[str], gate: Gate) -> None:
    """And nothing is left standing at the gate."""
    try:
        await answered_throughout(config, names, gate)
    finally:
        gate.open_for_good()


async def answered_throughout(config: RuntimeConfig, names: list[str], gate: Gate) -> None:
    """Held when the step is taken in, and when it is handed to the trainer at each thing that reads it."""
    parts = build_components(config)
    transport = httpx.ASGITransport(build_app(parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        members = [{"rollout": name, "reward": float(place)} for place, name in enumerate(names)]
        body = {"key": "k", "groups": [{"id": "g", "members": members}]}
        gate.shut()
        posted = asyncio.create_task(client.post("/slipway/steps", json=body))
        await answers_while_held(client, gate, posted)
        taken_in = await posted
        assert taken_in.status_code == 202, taken_in.text
        assert taken_in.json()["counts"]["turns_joined"] == ROLLOUTS * (TURNS - 1)
        gate.shut()
        driving = asyncio.create_task(parts.steps.run())
        for _ in ("sorted once more", "laid into a batch", "written down for people"):
            await answers_while_held(client, gate, driving)
        given = Path(config.state_dir) / "steps" / "000001" / "batch.json"
        await wait_until_async(given.exists)
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    for engine in parts.clients:
        await engine.close()


async def answers_while_held(client: httpx.AsyncClient, gate: Gate, work: asyncio.Task[object]) -> None:
    """`/healthz` answers as often as it is asked while the work stands at the gate, which then opens."""
    await wait_until_async(gate.held.is_set)
    assert not gate.stood_on_the_loop
    answers = [(await client.get("/healthz")).status_code for _ in range(ANSWERS)]
    assert answers == [200] * ANSWERS
    assert not work.done()
    gate.open()
