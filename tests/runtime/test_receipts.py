"""With the real gateway and relay: an answer nobody received trains nothing, a client's retry trains once.

The engine is a pretend one whose answers wait until they are let go.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from runtime.gateway.completions.in_flight import InFlightRequest
from runtime.gateway.gateway import build_components
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.versions.versions import Served
from runtime.shared.runtime_config import RuntimeConfig
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.runtime.recorded import asked
from tests.support.relay_process import RelayProcess
from tests.support.upstream import Upstream
from tests.support.waiting import wait_until, wait_until_async

CHAT = "/v1/chat/completions"
CLIENTS = 40
PATIENCE_SECONDS = 6.0
FOLLOWS = {"x-slipway-receipt": "follows"}


class Engine:
    """Its completions, each another word, once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        self._words = itertools.count()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.asked += 1
        await wait_until_async(self.answers.is_set)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"word {next(self._words)}"},
            "logprobs": {"content": [{"token": "x", "logprob": -1.0}]},
            "finish_reason": "stop",
            "token_ids": [5],
        }
        return web.json_response({"id": "c", "model": "base", "prompt_token_ids": [1], "choices": [choice]})


async def _well(_: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def gateway(engine: Engine, tmp_path: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory() as folder:
        upstream = Upstream(Path(folder) / "e.sock", {CHAT: engine, "/collective_rpc": _well})
        upstream.start()
        running = Gateway(tmp_path, upstream.socket, tmp_path).until_ready()
        yield running
        running.stop()
        upstream.close()


@pytest.fixture
def relay(gateway: Gateway, tmp_path: Path) -> Iterator[RelayProcess]:
    socket = Path(gateway.config["socket_dir"]) / "gateway.sock"
    relay = RelayProcess(socket, TOKEN, tmp_path / "relay.log")
    yield relay
    relay.stop()


def tell(gateway: Gateway, *receipts: tuple[str, str]) -> httpx.Response:
    body = {"receipts": [{"request": request, "state": state} for request, state in receipts]}
    return gateway.http.post("/slipway/receipts", json=body)


def marked(gateway: Gateway, rollout: str, request: str) -> httpx.Response:
    """Asked as the relay asks."""
    return gateway.chat(rollout, {"x-slipway-request": request, **FOLLOWS})


def counted(gateway: Gateway, rollout: str) -> tuple[int, int]:
    counts = gateway.counts(rollout)
    return counts["samples"], counts["unreceived"]


@pytest.mark.slow
def test_c52_who_said_that_a_receipt_follows_has_no_sample_without_one(gateway: Gateway) -> None:
    first = marked(gateway, "r", "q")
    assert counted(gateway, "r") == (0, 1)
    assert marked(gateway, "r", "q").content == first.content, "a replay is no receipt either"
    assert counted(gateway, "r") == (0, 1)
    gateway.kill()
    gateway.start()
    gateway.until_ready()
    assert counted(gateway, "r") == (0, 1)
    assert tell(gateway, ("q", "received"), ("never heard of", "received")).status_code == 204
    assert counted(gateway, "r") == (1, 0)
    gateway.kill()
    gateway.start()
    assert counted(gateway, "r") == (1, 0)


@pytest.mark.slow
def test_c52_without_a_relay_the_connection_says_what_was_received(gateway: Gateway, engine: Engine) -> None:
    assert gateway.chat("stays").status_code == 200
    assert counted(gateway, "stays") == (1, 0)
    engine.answers.clear()
    with pytest.raises(httpx.ReadTimeout):
        gateway.http.post(
            f"/rollouts/leaves{CHAT}",
            json={"model": "policy", "messages": MESSAGES},
            headers={"x-slipway-request": "q"},
            timeout=httpx.Timeout(60, read=0.2),
        )
    for _ in range(3):
        gateway.status()  # by then it has seen who left
    engine.answers.set()
    wait_until(lambda: len(gateway.recorded()) == 2, what="it is answered all the same")
    assert counted(gateway, "leaves") == (0, 1)


@pytest.mark.slow
def test_c52_a_call_that_comes_again_after_its_connection_broke_is_one_sample(gateway: Gateway) -> None:
    for request, state in (("first", "doubtful"), ("again", "received")):
        marked(gateway, "r", request)
        tell(gateway, (request, "received"), (request, state))
    assert counted(gateway, "r") == (1, 1)
    gateway.kill()
    gateway.start()
    assert counted(gateway, "r") == (1, 1)


@pytest.mark.slow
def test_c52_receipts_are_taken_from_who_has_the_token_and_in_form(gateway: Gateway) -> None:
    body = {"receipts": [{"request": "q", "state": "received"}]}
    refused = gateway.http.post("/slipway/receipts", json=body, headers={"Authorization": "Bearer x"})
    assert refused.status_code == 401
    assert tell(gateway, ("q", "eaten")).status_code == 400


@pytest.mark.slow
def test_c52_forty_clients_with_short_timeouts_while_the_laptop_sleeps_train_one_sample_each(
    gateway: Gateway, engine: Engine, relay: RelayProcess
) -> None:
    timeouts: list[int] = []

    def roll_out(number: int) -> str:
        """As OpenAI's client does: after a time-out a new connection, and the same body."""
        url = f"{relay.url}/rollouts/r{number}{CHAT}"
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 8}
        for attempt in range(100):
            try:
                answer = httpx.post(
                    url,
                    json=body,
                    headers={"Authorization": f"Bearer {TOKEN}"},
                    timeout=httpx.Timeout(60, read=PATIENCE_SECONDS),
                    trust_env=False,
                )
            except httpx.TransportError:
                timeouts.append(attempt)
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]
        raise AssertionError("never answered")

    engine.answers.clear()
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(roll_out, number) for number in range(CLIENTS)]
        wait_until(lambda: engine.asked >= CLIENTS, what="all are being answered")
        with relay.paused():
            engine.answers.set()
            wait_until(gateway.recorded, what="the gateway sends them")
            wait_until(lambda: timeouts.count(0) == CLIENTS, what="none of the clients was there any more")
        words = [it.result(timeout=300) for it in asked]

    assert len(set(words)) == CLIENTS
    names = [f"r{number}" for number in range(CLIENTS)]

    def all_counted() -> dict[str, Any] | None:
        """What was asked by clients that had left, too, once it is answered."""
        counts = counts_by(relay, names)
        assert counts["samples"] == CLIENTS
        return counts if counts["unreceived"] == len(gateway.recorded()) - CLIENTS else None

    assert wait_until(all_counted)["unreceived"] > 0
    for number, word in enumerate(words):
        assert counts_by(relay, [f"r{number}"])["samples"] == 1
        said = [
            line["answer"]["choices"][0]["message"]["content"]
            for line in gateway.recorded()
            if line["tags"]["rollout"] == f"r{number}"
        ]
        assert word in said


def counts_by(relay: RelayProcess, rollouts: list[str]) -> dict[str, Any]:
    """What a step that is asked through the relay would count."""
    members = [{"rollout": rollout} for rollout in rollouts]
    answer = httpx.post(
        f"{relay.url}/slipway/steps",
        json={"key": "probe", "groups": [{"id": "g", "members": members}]},
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=150,
        trust_env=False,
    )
    assert answer.status_code == 422, answer.text
    return answer.json()["error"]["counts"]


# ------------------------------------------------------------------ flights


class Connection:
    """An ASGI server's. Its client leaves while this part of its answer is being taken; None: it stays."""

    def __init__(self, leaves_at: int | None, body: bytes = b"") -> None:
        self._leaves_at = leaves_at
        self._asks = [{"type": "http.request", "body": body}]
        self._gone = asyncio.Event()
        self._taken = 0

    async def receive(self) -> dict[str, Any]:
        if self._asks:
            return self._asks.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            if self._taken == self._leaves_at:
                self._gone.set()
                for _ in range(5):  # the server waits until the connection takes more, and it does not
                    await asyncio.sleep(0)
            self._taken += 1


def delivered(leaves_at: int | None, parts: int = 3) -> InFlightRequest:
    """A recorded answer handed to a connection that leaves while this part is being taken."""

    async def scenario() -> InFlightRequest:
        flight, connection = InFlightRequest("digest"), Connection(leaves_at)
        flight.begin(200, [])
        for part in range(parts):
            flight.write(b"%d" % part)
        flight.recorded = True
        flight.end()
        await flight.deliver(connection.receive, connection.send, 0.0)
        return flight

    return asyncio.run(scenario())


def test_c52_without_a_relay_who_leaves_over_its_recorded_answer_has_no_sample(
    engine: Engine, tmp_path: Path
) -> None:
    """It was there when the answer was recorded; the same request comes again until it is received."""
    body = json.dumps({"model": "policy", "messages": MESSAGES}).encode()
    scope = {"headers": [(b"x-slipway-request", b"q")], "path_params": {"rollout": "r"}}

    async def scenario(sockets: str) -> None:
        config = {"run_id": "test", "model_path": "", "state_dir": str(tmp_path), "socket_dir": sockets}
        parts = build_components(RuntimeConfig.model_validate(config))
        parts.pool.engines[0].ready = True
        for leaves_at, samples in ((0, 0), (0, 0), (None, 1), (0, 1)):
            connection = Connection(leaves_at, body)
            await parts.completions.serve("chat", scope, connection.receive, connection.send)
            for store in (parts.samples, SampleStore(tmp_path / "samples")):
                known = len(store.of_rollout("r")), len(store.unreceived_of_rollout("r"))
                assert known == (samples, 1 - samples)
        await parts.clients[0].close()

    with tempfile.TemporaryDirectory() as sockets:
        upstream = Upstream(Path(sockets) / "engine-0.sock", {CHAT: engine})
        upstream.start()
        try:
            asyncio.run(scenario(sockets))
        finally:
            upstream.close()
    assert engine.asked == 1


def handed_out(folder: Path, sockets: Path, events: list[dict[str, Any]]) -> list[bytes]:
    """The parts of a streamed answer, for an engine that sends these events one by one."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (*map(json.dumps, events), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        return response

    async def scenario() -> list[bytes]:
        config = {"run_id": "test", "model_path": "", "state_dir": str(folder), "socket_dir": str(sockets)}
        parts = build_components(RuntimeConfig.model_validate(config))
        engine, flight = parts.pool.engines[0], InFlightRequest("digest")
        request, served = asked("q", "r", stream=True, n=2), Served(0, "base", "base")
        async with engine.client.post(CHAT, b"{}") as response:
            await parts.completions._stream(response, request, served, None, flight, engine)
        await engine.client.close()
        assert len(parts.samples.unreceived_of_rollout("r")) == 2, "recorded before its end is handed out"
        return flight.parts

    upstream = Upstream(sockets / "engine-0.sock", {CHAT: stream})
    upstream.start()
    try:
        return asyncio.run(scenario())
    finally:
        upstream.close()


def test_c52_a_program_that_leaves_at_the_finish_reason_has_the_end_of_the_events_too(tmp_path: Path) -> None:
    """Many do; the stream then ends for the relay before its end, and the answer was no sample."""

    def event(index: int, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": reason, "token_ids": [5]}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -1.0}]}
        return {"id": "c", "model": "base", "prompt_token_ids": [1], "choices": [choice]}

    usage = {"id": "c", "model": "base", "choices": [], "usage": {"prompt_tokens": 1}}
    events = [event(0), event(0, "stop"), event(1), event(1, "stop"), usage]
    with tempfile.TemporaryDirectory() as sockets:
        parts = handed_out(tmp_path, Path(sockets), events)
    assert [part.count(b"data: ") for part in parts] == [1, 2, 3]
    assert parts[-1].count(b"stop") == 1 and parts[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("leaves_at", "received"), [(None, True), (0, False), (1, False), (2, False)])
def test_c52_an_answer_is_received_when_all_of_it_was_taken(leaves_at: int | None, received: bool) -> None:
    assert delivered(leaves_at).received == received
