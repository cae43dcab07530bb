"""A retired route is answered with one line that names the way, at the gateway and through the relay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from launcher.proxy.relay import Relay
from runtime.gateway.gateway import build_app, build_components
from runtime.gateway.http.retired import RETIRED
from runtime.shared.runtime_config import RuntimeConfig
from tests.runtime.gateway_process import TOKEN
from tests.runtime.gateway_run import gateway_runs


def check(answer: Any, route: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "retired", "invalid_request_error")
    assert error["message"] == RETIRED[route] and "\n" not in error["message"]


@pytest.fixture
def gateway(tmp_path: Path) -> TestClient:
    where = {"state_dir": str(tmp_path / "state"), "socket_dir": str(tmp_path)}
    config = RuntimeConfig.model_validate({"run_id": "r", "model_path": "Qwen/Qwen3-8B", **where})
    return TestClient(build_app(build_components(config)))


def test_every_retired_route_names_the_way_by_both_of_its_addresses(gateway: TestClient) -> None:
    for route in RETIRED:
        check(gateway.post(route, json={}), route)
        check(gateway.post(f"/v1{route}", json={}), route)
    assert gateway.post("/v1/never-there", json={}).json()["error"]["code"] == "not_served"


@pytest.fixture(params=["--arbor", "--art"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A run's relay under each option by which this user's programs need no key."""
    with gateway_runs(tmp_path) as make:
        relay = Relay(make().gateway.socket, 0, token=TOKEN, keyless_option=request.param)
        yield f"http://127.0.0.1:{relay.start()}"
        relay.stop()


@pytest.mark.process
def test_through_the_relay_they_say_the_same(door: str) -> None:
    with httpx.Client(base_url=door, trust_env=False, timeout=60) as client:
        for route in RETIRED:
            check(client.post(route, json={}), route)
