"""What the gateway makes of an engine that fails at one request and lives on. The engine is a pretend one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.runtime.gateway_process import Gateway
from tests.support.upstream import Upstream

CHAT = "/v1/chat/completions"
EVENT = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\ndata: [DONE]\n\n'
ANSWER = {
    "id": "c",
    "model": "base",
    "prompt_token_ids": [1],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": [{"token": "x", "logprob": -1.0}]},
            "finish_reason": "stop",
            "token_ids": [5],
        }
    ],
}


TOOL = {"type": "function", "function": {"name": "f"}}


class Failing:
    """A pretend engine's completions: the first `failures` of them fail."""

    def __init__(self) -> None:
        self.failures = 0
        self.asked = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.asked > self.failures:
            return web.json_response(ANSWER)
        if (await request.json()).get("stream"):
            return web.Response(body=EVENT, content_type="text/event-stream")
        return web.json_response({"error": {"message": "TypeError", "code": 500}}, status=500)


async def _well(request: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Path, Failing]]:
    failing = Failing()
    with tempfile.TemporaryDirectory() as folder:
        upstream = Upstream(Path(folder) / "e.sock", {CHAT: failing, "/collective_rpc": _well})
        upstream.start()
        yield upstream.socket, failing
        upstream.close()


@pytest.fixture(scope="module")
def gateway(engine: tuple[Path, Failing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    running = Gateway(folder, engine[0], folder).until_ready()
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("failures", "fields", "status", "code", "asked"),
    [
        (1, {}, 200, None, 2),
        (9, {}, 400, "request_failed", 2),
        (9, {"stream": True}, 400, "request_failed", 2),
        (9, {"structured_outputs": {"regex": "a"}}, 400, "grammar_failed", 1),
        (9, {"response_format": {"type": "json_object"}, "stream": True}, 400, "grammar_failed", 1),
        (9, {"tools": [TOOL], "tool_choice": "required"}, 400, "grammar_failed", 1),
        (9, {"tools": [TOOL]}, 400, "request_failed", 2),
        (1, {"tools": [TOOL]}, 200, None, 2),
    ],
)
def test_a_request_an_engine_fails_at_is_asked_once_more_and_then_refused(
    gateway: Gateway,
    engine: tuple[Path, Failing],
    failures: int,
    fields: dict[str, Any],
    status: int,
    code: str | None,
    asked: int,
) -> None:
    failing = engine[1]
    failing.asked, failing.failures = 0, failures
    answer = gateway.chat(**fields)
    assert (answer.status_code, failing.asked) == (status, asked), answer.text
    assert answer.json().get("error", {}).get("code") == code
    assert gateway.status()["phase"] == "ready"


def test_a_field_that_has_no_effect_here_is_named_with_the_answer(
    gateway: Gateway, engine: tuple[Path, Failing]
) -> None:
    engine[1].asked = engine[1].failures = 0
    retried = {"x-slipway-request": "seeded"}
    for _ in range(2):
        assert gateway.chat(seed=7, headers=retried).headers["x-slipway-ignored"] == "seed"
    assert "x-slipway-ignored" not in gateway.chat().headers
