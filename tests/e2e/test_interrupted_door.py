"""The real gateway frozen and killed while a program asks: every answer comes, every sample is made once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from launcher.base.home import Home
from launcher.records.endpoint import LocalEndpoint
from launcher.records.records import RecordStore
from tests.support.launched import Launched, processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

REQUESTS = 60


@pytest.fixture
def door(endpoint: Launched) -> Iterator[httpx.Client]:
    """The shared run's relay, as a program meets it."""
    store = RecordStore(Home(endpoint.home, endpoint.home, endpoint.home))
    found = LocalEndpoint.of(store.load("shared"), store)
    headers = {"authorization": f"Bearer {found.token}"}
    with httpx.Client(base_url=found.root, headers=headers, timeout=600, trust_env=False) as client:
        yield client


def _ask_all(door: httpx.Client, meanwhile: Callable[[], None]) -> list[httpx.Response]:
    """REQUESTS completions, eight at a time; `meanwhile` once a quarter of them are answered."""

    def ask(at: int) -> httpx.Response:
        messages = [{"role": "user", "content": f"the red cat {at}"}]
        body = {"model": "policy", "messages": messages, "max_tokens": 24, "temperature": 1.0}
        return door.post(f"/rollouts/r{at}/v1/chat/completions", json=body)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, at) for at in range(REQUESTS)]
        wait_until(lambda: sum(it.done() for it in asked) >= REQUESTS // 4, 600, "a quarter is answered")
        meanwhile()
        return [it.result(timeout=600) for it in asked]


def _samples(door: httpx.Client) -> int:
    return door.get("/slipway/status").json()["samples"]


def _gateway(endpoint: Launched) -> psutil.Process:
    """The process that serves, not the tether that holds it."""
    (found,) = [
        process
        for process in processes_of(endpoint.run_id)
        if "runtime.gateway.gateway" in process.cmdline() and "runtime.tether" not in process.cmdline()
    ]
    return found


def _check(door: httpx.Client, answers: list[httpx.Response], before: int) -> None:
    assert [it.status_code for it in answers] == [200] * REQUESTS
    ids = {it.json()["id"] for it in answers}
    assert len(ids) == REQUESTS, "no answer was given to two requests"
    assert _samples(door) - before == REQUESTS, "and no request was sampled twice"


def test_g05_a_real_gateway_frozen_for_less_than_the_lease_costs_nothing(
    endpoint: Launched, door: httpx.Client
) -> None:
    gateway, before = _gateway(endpoint), _samples(door)

    def freeze() -> None:
        gateway.suspend()
        try:
            # As long as the relay's own look at it takes to fail.
            wait_until(lambda: _stands_still(door), 120, "the door feels it")
        finally:
            gateway.resume()

    _check(door, _ask_all(door, freeze), before)
    assert _gateway(endpoint).pid == gateway.pid, "nobody started it anew"


def test_g17_a_real_gateway_killed_in_the_middle_makes_no_sample_twice_and_loses_none(
    endpoint: Launched, door: httpx.Client
) -> None:
    gateway, before = _gateway(endpoint), _samples(door)
    _check(door, _ask_all(door, lambda: os.kill(gateway.pid, signal.SIGKILL)), before)
    assert _gateway(endpoint).pid != gateway.pid


def _stands_still(door: httpx.Client) -> bool:
    """Whether a question meets silence for a whole second."""
    try:
        door.get("/healthz", timeout=1.0)
    except httpx.TimeoutException:
        return True
    return False
