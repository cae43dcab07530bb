"""Retries, lost links and cancelled streams of the other dialects: by a chat's rules (test_gateway.py)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.runtime.conftest import running_in_engine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NAMED = "x-slipway-request"
# An answer of some seconds.
LONG = 400
ROUTES = ["/v1/responses", "/v1/messages", "/inference/v1/generate"]


@pytest.fixture(scope="module")
def gateway(engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("gateway"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def body(route: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for exactly so many tokens."""
    limit, asked = "max_tokens", {"model": "policy", "ignore_eos": True}
    if route.endswith("generate"):
        del asked["ignore_eos"]
        asked["token_ids"] = [5, 6, 7]
        return asked | {"sampling_params": {"max_tokens": tokens, "ignore_eos": True}, **fields}
    if route == "/v1/responses":
        limit, asked["input"] = "max_output_tokens", MESSAGES
    else:
        asked["messages"] = MESSAGES
    return asked | {limit: tokens, **fields}


def ask(gateway: Gateway, route: str, name: str, tokens: int = 12, **fields: Any) -> httpx.Response:
    """A request in the rollout of its name."""
    path = f"/rollouts/{name}{route}"
    return gateway.http.post(path, json=body(route, tokens, **fields), headers={NAMED: name})


def samples(gateway: Gateway, name: str) -> tuple[int, int]:
    """How many samples a rollout has, and how many of them nobody received."""
    counts = gateway.counts(name)
    return counts["samples"], counts["unreceived"]


def test_c06_a_retried_request_is_answered_alike_and_is_one_sample(gateway: Gateway) -> None:
    asked = {
        f"retried-{stream}{route.replace('/', '-')}": (route, stream)
        for route in ROUTES
        for stream in (False, True)
    }

    def ask_again(name: str) -> httpx.Response:
        route, stream = asked[name]
        return ask(gateway, route, name, stream=stream)

    with ThreadPoolExecutor(3) as pool:  # at once: they join the one in flight; then the stored answer
        answers = {name: list(pool.map(ask_again, [name] * 4)) for name in asked}
    past = {"token_ids": [5], "sampling_params": {"max_tokens": 10**6, "stop_token_ids": list(range(800))}}
    limit = {"url": "/inference/v1/generate", "json": past, "headers": {NAMED: "past-the-context"}}
    first = gateway.http.post(**limit)
    gateway.kill()
    gateway.start()
    again = gateway.http.post(**limit)  # before it knows of the engines again
    assert (again.status_code, again.content) == (200, first.content)
    gateway.until_ready()
    for name, given in answers.items():
        given.append(ask_again(name))  # by another process
        assert {answer.status_code for answer in given} == {200}, given[0].text
        assert len({answer.content for answer in given}) == 1
        assert samples(gateway, name) == (1, 0)
        other = ask(gateway, asked[name][0], name, tokens=13)
        assert other.status_code == 409, other.text


@pytest.mark.parametrize("route", ROUTES)
def test_c06_a_cancelled_stream_is_no_sample_and_ends_in_the_engine(
    gateway: Gateway, engine: Any, route: str
) -> None:
    name = f"cancelled{route.replace('/', '-')}"
    asked = body(route, LONG, stream=True)
    with gateway.http.stream("POST", f"/rollouts/{name}{route}", json=asked) as answer:
        assert "data: " in next(answer.iter_text())
    wait_until(lambda: running_in_engine(engine) == 0)
    assert samples(gateway, name) == (0, 0)


@pytest.mark.parametrize("route", ROUTES)
def test_g17_a_request_that_timed_out_and_comes_again_is_one_sample(gateway: Gateway, route: str) -> None:
    name = f"late{route.replace('/', '-')}"
    with pytest.raises(httpx.ReadTimeout):
        gateway.http.post(
            f"/rollouts/{name}{route}",
            json=body(route, LONG),
            headers={NAMED: name},
            timeout=httpx.Timeout(10, read=0.15),
        )
    assert ask(gateway, route, name, LONG).status_code == 200
    assert samples(gateway, name) == (1, 0)


@pytest.mark.parametrize("route", ROUTES)
def test_c52_an_answer_is_a_sample_once_the_relay_says_that_it_was_received(
    gateway: Gateway, route: str
) -> None:
    name = f"receipt{route.replace('/', '-')}"
    headers = {NAMED: name, "x-slipway-receipt": "follows"}
    gateway.http.post(f"/rollouts/{name}{route}", json=body(route, 4), headers=headers)
    assert samples(gateway, name) == (0, 1)
    receipt = {"receipts": [{"request": name, "state": "received"}]}
    assert gateway.http.post("/slipway/receipts", json=receipt).status_code == 204
    assert samples(gateway, name) == (1, 0)
