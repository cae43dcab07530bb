"""relay_receipts.py before a real server: the gateway hears of what arrived, and of nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from aiohttp import web

from launcher.proxy import relay_forward, relay_rules
from launcher.proxy.relay import Relay
from launcher.proxy.relay_connection import peer_state
from runtime.shared.event_streams import COMMENT_END, OPENAI_END
from tests.support.upstream import Upstream, upstream_in_a_folder
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
RECEIPTS = "/slipway/receipts"
STEPS = "/slipway/steps"
SAMPLED = {"x-slipway-policy-version": "3"}


class Gateway:
    """What the tests say and hear of the pretend gateway."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.told: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        # Answers wait for this.
        self.answers = threading.Event()
        self.answers.set()
        self.answered: list[str] = []
        upstream.handlers |= {CHAT: self.chat, RECEIPTS: self.take}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        await wait_until_async(self.answers.is_set)
        response = web.Response(body=b'{"ok": true}', headers=SAMPLED)
        await response.prepare(request)
        await response.write_eof()
        self.answered.append(request.headers["x-slipway-request"])
        return response

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.told += [(one["request"], one["state"]) for one in (await request.json())["receipts"]]
        self.authorizations.append(request.headers["Authorization"])
        return web.Response(status=204)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with upstream_in_a_folder() as upstream:
        yield Gateway(upstream)


@pytest.fixture
def door(gateway: Gateway) -> Iterator[Relay]:
    door = Relay(gateway.upstream.socket, 0, replay_seconds=30, token="T")
    yield door
    door.stop()


@pytest.fixture
def port(door: Relay) -> int:
    return door.start()


@pytest.fixture
def client(port: int) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer T"}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=60
    ) as client:
        yield client


def ask(client: httpx.Client, name: str) -> None:
    assert client.post(CHAT, json={}, headers={"x-slipway-request": name}).status_code == 200


def program(port: int, name: str) -> socket.socket:
    """One that has asked, and may leave without its answer."""
    connected = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer T\r\nx-slipway-request: {name}"
    connected.sendall(f"{head}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    return connected


def reset(connected: socket.socket) -> None:
    """Leave as one does who has not read what came."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def test_c52_what_reached_its_program_has_a_receipt(gateway: Gateway, client: httpx.Client) -> None:
    ask(client, "a")
    ask(client, "b")
    wait_until(lambda: len(gateway.told) == 2)
    assert gateway.told == [("a", "received"), ("b", "received")]
    assert set(gateway.authorizations) == {"Bearer T"}
    asked = [headers for headers in gateway.upstream.headers if "x-slipway-receipt" in headers]
    assert [headers["x-slipway-receipt"] for headers in asked] == ["follows"] * 2


def test_c52_a_program_that_hung_up_while_its_answer_was_on_its_way_has_none(
    gateway: Gateway, port: int, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laptop falls asleep with the answer in the relay's hands, and the program's patience ends."""
    sleeps, wakes = threading.Event(), threading.Event()

    def sleep(instant: str) -> None:
        if instant == "relay.answered":
            sleeps.set()
            wakes.wait(60)

    monkeypatch.setattr(relay_forward, "failpoint", sleep)
    leaving = program(port, "left")
    assert sleeps.wait(60), "it has the answer"
    leaving.close()
    wakes.set()
    ask(client, "stayed")
    wait_until(lambda: gateway.told)
    assert gateway.told == [("stayed", "received")]


def test_c52_a_program_that_leaves_between_the_last_look_and_its_answer_has_none(
    gateway: Gateway, port: int, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has closed in order, so that reading says no more than this; the answer is thrown away."""
    gateway.answers.clear()
    leaving = program(port, "left")
    looks = 0

    def leave(transport: asyncio.BaseTransport | None) -> str:
        nonlocal looks
        looks += 1
        seen = peer_state(transport)
        if looks == 1:
            assert seen == "open"
            leaving.close()
        return seen

    monkeypatch.setattr(relay_forward, "peer_state", leave)
    gateway.answers.set()
    wait_until(lambda: looks >= 2, what="it has looked before and after")
    ask(client, "stayed")
    wait_until(lambda: gateway.told)
    assert gateway.told == [("stayed", "received")]


def test_c52_a_stream_that_was_reset_at_its_end_is_not_received_a_moment_later(
    gateway: Gateway, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says of a reset once, and the end of the response comes right after that of the events."""
    says = ["open", "reset"]
    monkeypatch.setattr(relay_forward, "peer_state", lambda _: says.pop(0) if says else "closed")

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SAMPLED | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(OPENAI_END)
        return response

    gateway.upstream.handlers[CHAT] = events
    ask(client, "reset")
    assert not says
    monkeypatch.setattr(relay_forward, "peer_state", peer_state)
    gateway.upstream.handlers[CHAT] = gateway.chat
    ask(client, "after")
    wait_until(lambda: gateway.told)
    assert gateway.told == [("after", "received")]


def test_c52_a_program_that_hangs_up_before_its_answer_has_none(
    gateway: Gateway, door: Relay, port: int, client: httpx.Client
) -> None:
    gateway.answers.clear()
    leaving = program(port, "left")
    wait_until(lambda: gateway.upstream.seen, what="the gateway was asked")
    leaving.close()
    wait_until(lambda: door.stats().active == 0, what="the relay has seen it")
    gateway.answers.set()
    ask(client, "stayed")
    wait_until(lambda: gateway.told)
    assert gateway.told == [("stayed", "received")]


def test_c52_a_connection_that_breaks_over_its_answer_makes_it_doubtful(
    gateway: Gateway, port: int, client: httpx.Client
) -> None:
    leaving = program(port, "unread")
    wait_until(lambda: gateway.told, what="it was handed over")
    reset(leaving)
    ask(client, "next")  # whoever comes later is told of later
    wait_until(lambda: ("next", "received") in gateway.told)
    assert gateway.told == [("unread", "received"), ("unread", "doubtful"), ("next", "received")]


def test_c52_a_connection_that_breaks_after_the_next_request_says_nothing_of_the_last_answer(
    gateway: Gateway, door: Relay, port: int, client: httpx.Client
) -> None:
    leaving = program(port, "read")
    wait_until(lambda: gateway.told)
    leaving.sendall(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer T\r\nContent-Length: 9\r\n\r\n"
    )
    wait_until(lambda: door._runner.server and door._runner.server.requests_count == 2)
    reset(leaving)
    wait_until(lambda: not (door._runner.server and door._runner.server.connections), what="it is gone")
    ask(client, "next")  # whoever comes later is told of later
    wait_until(lambda: ("next", "received") in gateway.told)
    assert gateway.told == [("read", "received"), ("next", "received")]


def test_c52_rewards_wait_until_what_was_received_is_told(
    gateway: Gateway, door: Relay, client: httpx.Client
) -> None:
    takes = threading.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await wait_until_async(takes.is_set)
        return await gateway.take(request)

    gateway.upstream.handlers[RECEIPTS] = slow
    ask(client, "a")
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(client.post, STEPS, json={})
        try:
            wait_until(lambda: door.stats().requests == 2, what="the relay has the step")
            wait_until(lambda: RECEIPTS in [path for _, path in gateway.upstream.seen])
            for _ in range(5):  # what gives no reward does not wait
                assert client.get("/slipway/status").status_code == 200
            assert STEPS not in [path for _, path in gateway.upstream.seen]
        finally:
            takes.set()
        assert step.result(60).status_code == 200
    assert gateway.told == [("a", "received")]


def test_c52_receipts_are_told_again_until_the_gateway_takes_them(
    gateway: Gateway, client: httpx.Client
) -> None:
    refusals = ["lost", "busy"]

    async def late(request: web.Request) -> web.StreamResponse:
        refusal = refusals.pop() if refusals else None
        if refusal == "lost":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=503) if refusal else await gateway.take(request)

    gateway.upstream.handlers[RECEIPTS] = late
    ask(client, "a")
    assert client.post(STEPS, json={}).status_code == 200
    assert gateway.told == [("a", "received")] and not refusals


def test_c52_a_door_that_closes_tells_the_last_of_them(
    gateway: Gateway, door: Relay, client: httpx.Client
) -> None:
    for name in "abc":
        ask(client, name)
    door.stop()
    assert gateway.told == [(name, "received") for name in "abc"]


def test_c52_what_sampled_nothing_has_no_receipt(gateway: Gateway, client: httpx.Client) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {}}, status=400)

    gateway.upstream.handlers["/v1/completions"] = refuse
    assert client.post("/v1/completions", json={}).status_code == 400
    assert client.get("/v1/models").status_code == 200
    ask(client, "sampled")
    wait_until(lambda: gateway.told)
    assert gateway.told == [("sampled", "received")]


@pytest.mark.parametrize("end", [OPENAI_END, COMMENT_END, None], ids=["OpenAI", "comment", "before"])
def test_c52_a_stream_is_received_once_the_end_of_its_events_is_there(
    gateway: Gateway, door: Relay, client: httpx.Client, end: bytes | None
) -> None:
    left = threading.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SAMPLED | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"a": 1}\n\n')
        if end is not None:
            await response.write(end[:5])
            await asyncio.sleep(0)
            await response.write(end[5:])
        await wait_until_async(left.is_set)
        return response

    gateway.upstream.handlers[CHAT] = events
    with client.stream("POST", CHAT, json={}, headers={"x-slipway-request": "s"}) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_raw()
        got = b""
        while (end or b"data: {") not in got:
            got += next(pieces)
    wait_until(lambda: door.stats().active == 0, what="the relay has seen it leave")
    left.set()
    gateway.upstream.handlers[CHAT] = gateway.chat
    ask(client, "after")
    wait_until(lambda: ("after", "received") in gateway.told)
    assert [name for name, state in gateway.told if state == "received"] == (
        ["after"] if end is None else ["s", "after"]
    )


def test_c52_of_two_ids_the_receipt_and_the_gateway_know_the_same(gateway: Gateway, port: int) -> None:
    given: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        given.extend(request.headers.getall("x-slipway-request"))
        return await gateway.chat(request)

    gateway.upstream.handlers[CHAT] = note
    with program(port, "a\r\nx-slipway-request: b"):
        wait_until(lambda: gateway.told)
        # Now: when it leaves without having read its answer, that becomes doubtful.
        assert gateway.told == [(name, "received") for name in given]


def test_c52_a_step_is_known_in_every_spelling_of_its_path_that_the_gateway_takes() -> None:
    assert relay_rules.names_samples("POST", STEPS) and relay_rules.names_samples("POST", f"{STEPS}?a=b")
    assert relay_rules.names_samples("POST", "/slipway/%73teps")
    assert not relay_rules.names_samples("GET", STEPS) and not relay_rules.names_samples("POST", RECEIPTS)


def test_c52_a_receipt_names_the_id_the_relay_gave(gateway: Gateway, client: httpx.Client) -> None:
    assert json.loads(client.post(CHAT, json={}).content) == {"ok": True}
    wait_until(lambda: gateway.told)
    (asked,) = [name for name, path in gateway.upstream.seen if path == CHAT]
    assert gateway.told == [(asked, "received")]
