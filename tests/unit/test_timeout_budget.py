"""timeout_budget.py: one number for how long an absent runtime is waited for, which none contradicts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.ssh import link
from launcher.base import timeout_budget
from launcher.client import wire
from launcher.client.connection import Connection
from launcher.client.failures import EndpointLost, NotConnected
from launcher.client.steps import TrainingSteps
from launcher.client.wire import AsyncWire, Endpoint, Patience, Wire
from launcher.proxy.relay import Relay
from launcher.records.lease import Lease
from launcher.run import runtime_monitor
from launcher.run.runtime_monitor import RuntimeMonitor
from launcher.run.work import WatchedRun
from launcher.types.settings import MIN_LEASE_SECONDS, SETTINGS
from runtime import health
from runtime.gateway.engines import engine_client, engine_pool

USUAL_LEASE = float(SETTINGS["lease"].default)
LEASES = (MIN_LEASE_SECONDS, 60.0, USUAL_LEASE, 4 * 3600.0)


def test_the_program_and_launch_call_it_the_same() -> None:
    assert wire.PATIENCE_VARIABLE == timeout_budget.VARIABLE
    assert timeout_budget.seconds(USUAL_LEASE, rented=True) == wire._DEFAULT_AWAY_SECONDS
    assert wire._MAX_SAMPLING_SECONDS == engine_client._COMPLETION_SECONDS


@pytest.mark.parametrize("lease_seconds", LEASES)
def test_g05_a_rented_runtime_is_waited_for_as_long_as_it_waits_for_us(lease_seconds: float) -> None:
    assert timeout_budget.seconds(lease_seconds, rented=True) >= lease_seconds
    assert timeout_budget.seconds(USUAL_LEASE, rented=True) == USUAL_LEASE
    assert timeout_budget.seconds(lease_seconds, rented=False) == timeout_budget.MIN_SECONDS


@pytest.mark.parametrize("rented", [False, True])
@pytest.mark.parametrize("lease_seconds", LEASES)
def test_g17_a_client_waits_longer_than_the_door_may_take_to_answer(
    lease_seconds: float, rented: bool
) -> None:
    """It hangs up on a door that still asks for it in no case: that would be another question."""
    door = timeout_budget.seconds(lease_seconds, rented)
    client = Patience.of_run({timeout_budget.VARIABLE: str(door)})
    assert client.away_seconds >= door
    # Before rewards the door says which answers arrived; then it asks, and the runtime samples.
    assert client.answer_seconds >= door + door + engine_client._COMPLETION_SECONDS
    waiting = TrainingSteps(Connection(Endpoint("http://127.0.0.1:1", "token"), client))
    assert waiting._timeout(None) > door, "a step may meet a link that is away"
    assert waiting._timeout(0.0) == 0.0


@pytest.mark.parametrize("rented", [False, True])
@pytest.mark.parametrize("lease_seconds", LEASES)
def test_g23_what_mends_itself_has_its_time_before_anybody_gives_up(
    lease_seconds: float, rented: bool
) -> None:
    waited = timeout_budget.seconds(lease_seconds, rented)
    frozen = health.STALL_SECONDS + engine_pool.WAIT_SECONDS
    assert waited > frozen, "a gateway that froze is ended and started again, then it waits for its engines"
    assert waited > link.MAX_UNANSWERED_SECONDS + 60.0, "a link that fell silent is made anew"
    lease = Lease(lease_seconds, 0.0)
    answer = min(runtime_monitor._ANSWER_SECONDS, lease_seconds / 4)
    assert lease.renew_every + answer + runtime_monitor._POLL_SECONDS < lease.seconds, (
        "one renewal may be lost"
    )


@pytest.mark.process
def test_g23_one_patience_is_told_to_the_door_the_heart_the_work_and_the_program(
    live: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: dict[str, float] = {}
    open_door, first_beat, watch = Relay.__init__, RuntimeMonitor.start, WatchedRun.__init__

    def door(self: Relay, socket: Path, port: int | None, replay_seconds: float, *others: Any) -> None:
        told["door"] = replay_seconds
        open_door(self, socket, port, replay_seconds, *others)

    def beat(self: RuntimeMonitor, timeout_budget_seconds: float, *others: Any) -> None:
        told["heart"] = timeout_budget_seconds
        first_beat(self, timeout_budget_seconds, *others)

    def work(self: WatchedRun, *fields: Any, **named: Any) -> None:
        watch(self, *fields, **named)
        told["work"] = self.timeout_budget_seconds

    monkeypatch.setattr(Relay, "__init__", door)
    monkeypatch.setattr(RuntimeMonitor, "start", beat)
    monkeypatch.setattr(WatchedRun, "__init__", work)
    monkeypatch.setattr("launcher.base.timeout_budget.MIN_SECONDS", 41.5)
    seen = tmp_path / "seen.json"
    text = f"import os, json; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"
    assert live((sys.executable, "-c", text)).code == 0
    assert told == {"door": 41.5, "heart": 41.5, "work": 41.5}
    program = Patience.of_run(json.loads(seen.read_text()))
    assert program.away_seconds == 42.0, "in whole seconds, and not less"


def test_a_patience_that_is_no_number_is_refused() -> None:
    with pytest.raises(NotConnected, match="LAUNCH_PATIENCE_SECONDS"):
        Patience.of_run({timeout_budget.VARIABLE: "long"})


@pytest.mark.process
@pytest.mark.parametrize("how", ["at once", "from an event loop"])
def test_g23_a_door_that_is_shut_is_given_up_soon_however_long_a_runtime_is_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is over: `launch` has closed its door, and a program in another terminal asks on."""
    monkeypatch.setattr("launcher.client.wire._CONNECTION_REFUSED_SECONDS", 0.4)
    with socket.socket() as shut:  # bound, and nobody listens
        shut.bind(("127.0.0.1", 0))
        endpoint = Endpoint(f"http://127.0.0.1:{shut.getsockname()[1]}", "token")
        begun = time.monotonic()
        with pytest.raises(EndpointLost, match="ConnectError"):
            _asked(endpoint) if how == "at once" else asyncio.run(_asked_from_a_loop(endpoint))
    assert time.monotonic() - begun < 45, "a bound, not a measure"


def _asked(endpoint: Endpoint) -> None:
    Wire(endpoint, Patience(60.0, 60.0)).send("GET", "/slipway/status")


async def _asked_from_a_loop(endpoint: Endpoint) -> None:
    await AsyncWire(endpoint, Patience(60.0, 60.0)).send("GET", "/slipway/status")


def test_a_program_takes_the_patience_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, timeout_budget.VARIABLE, "240")
    taken = Connection(Endpoint("http://127.0.0.1:1", "token")).wire.patience
    assert taken.away_seconds == 240.0
