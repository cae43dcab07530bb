"""relay.py before a real server on a Unix socket: nothing lost, nothing doubled, nobody else in."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from launcher.base.errors import PreflightError
from launcher.proxy import relay
from launcher.proxy.relay import Relay
from tests.support.upstream import Upstream
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.process

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    folder = Path(tempfile.mkdtemp(prefix="relay-"))  # pytest's folders are too deep for a socket's path
    gateway = Upstream(folder / "gateway.sock")
    gateway.start()
    yield gateway
    gateway.close()
    shutil.rmtree(folder)


@pytest.fixture
def door(upstream: Upstream) -> Iterator[Relay]:
    door = Relay(upstream.socket, 0, replay_seconds=30)
    yield door
    door.stop()


@pytest.fixture
def client(door: Relay) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{door.start()}", trust_env=False, timeout=60) as client:
        yield client


def test_a_request_passes_untouched_and_is_stamped(upstream: Upstream, client: httpx.Client) -> None:
    answer = client.post(
        "/rollouts/a%2Fb/v1/x?q=a%20b&q=%C3%BC", json=BODY, headers={"Authorization": "Bearer T"}
    )

    assert answer.json()["path"] == "/rollouts/a%2Fb/v1/x?q=a%20b&q=%C3%BC"
    passed = upstream.headers[0]
    assert passed["Authorization"] == "Bearer T" and len(passed["x-slipway-request"]) == 32
    assert passed["Host"] == "localhost" and passed["Content-Type"] == "application/json"


def test_every_request_has_an_id_of_its_own_unless_the_client_gave_one(
    upstream: Upstream, client: httpx.Client
) -> None:
    for headers in ({}, {}, {"x-slipway-request": "mine"}):
        client.post(CHAT, json=BODY, headers=headers)

    ids = [request_id for request_id, _ in upstream.seen]
    assert len(set(ids)) == 3 and ids[2] == "mine"


def test_headers_of_a_connection_stay_with_it(upstream: Upstream, client: httpx.Client) -> None:
    client.post(
        CHAT,
        json=BODY,
        headers={"Connection": "keep-alive, X-Mine", "X-Mine": "1", "TE": "gzip", "X-Kept": "1"},
    )

    passed = {name.lower() for name in upstream.headers[0]}
    assert "x-kept" in passed and not passed & {"x-mine", "te", "connection", "keep-alive"}


def test_an_error_answer_of_the_gateway_passes_as_it_is(upstream: Upstream, client: httpx.Client) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})

    upstream.handlers[CHAT] = refuse
    answer = client.post(CHAT, json=BODY)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert answer.json() == {"error": {"message": "full"}} and len(upstream.seen) == 1


def test_g17_a_restart_of_the_gateway_makes_one_answer_and_no_error(
    upstream: Upstream, door: Relay, client: httpx.Client
) -> None:
    async def slow_then_stored(request: web.Request) -> web.Response:
        request_id = request.headers["x-slipway-request"]
        if request_id not in upstream.sampled:
            upstream.sampled[request_id] = f"sampled {len(upstream.sampled)}"
            await asyncio.sleep(30)  # the answer never leaves: the gateway is killed first
        return web.json_response({"answer": upstream.sampled[request_id]})

    upstream.handlers[CHAT] = slow_then_stored
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(client.post, CHAT, json=BODY) for _ in range(20)]
        wait_until(lambda: len(upstream.sampled) == 20, what="all are sampled")
        upstream.stop()
        wait_until(lambda: door.stats().replays >= 20, what="all are being asked again")
        upstream.start()
        answers = [answer.result(timeout=60) for answer in asked]

    assert [answer.status_code for answer in answers] == [200] * 20
    assert len({answer.json()["answer"] for answer in answers}) == len(upstream.sampled) == 20
    assert door.stats().given_up == 0
    # An answer is with its client before the relay has counted it.
    wait_until(lambda: door.stats().active == 0, what="no request is under way")


def test_a_gateway_that_asks_for_patience_is_asked_again(upstream: Upstream, client: httpx.Client) -> None:
    async def busy_once(request: web.Request) -> web.Response:
        if len(upstream.seen) == 1:
            return web.Response(status=503, headers={"Retry-After": "0"}, text="the engine restarts")
        return web.json_response({"ok": True})

    upstream.handlers[CHAT] = busy_once
    assert client.post(CHAT, json=BODY).json() == {"ok": True}
    assert upstream.seen[0] == upstream.seen[1]


def test_an_answer_cut_in_its_middle_is_asked_for_again(upstream: Upstream, client: httpx.Client) -> None:
    async def cut_once(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"12345")
        if len(upstream.seen) == 1:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"67890")
        return response

    upstream.handlers[CHAT] = cut_once
    assert client.post(CHAT, json=BODY).content == b"1234567890" and len(upstream.seen) == 2


def test_the_waiting_is_bounded_and_ends_in_503_with_retry_after(upstream: Upstream) -> None:
    upstream.stop()
    door = Relay(upstream.socket, 0, replay_seconds=0.5)
    try:
        begun = time.monotonic()
        answer = httpx.post(f"http://127.0.0.1:{door.start()}{CHAT}", json=BODY, trust_env=False, timeout=60)
        assert time.monotonic() - begun < 25
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "runtime_unreachable"
        stats = door.stats()
        assert stats.given_up == 1 and not stats.connected and stats.last_error
    finally:
        door.stop()


def test_a_gateway_that_stands_still_is_given_up_within_the_bound(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A listening socket that nobody serves: what a frozen process looks like from outside.
    upstream.stop()
    monkeypatch.setattr(relay, "_PROBE_SECONDS", 0.2)
    monkeypatch.setattr(relay, "_PROBE_PERIOD_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(upstream.socket))
        frozen.listen(16)
        door = Relay(upstream.socket, 0, replay_seconds=0.6)
        try:
            begun = time.monotonic()
            answer = httpx.post(
                f"http://127.0.0.1:{door.start()}{CHAT}", json=BODY, trust_env=False, timeout=60
            )
            assert answer.status_code == 503 and time.monotonic() - begun < 25
        finally:
            door.stop()


def test_events_pass_one_by_one(upstream: Upstream, client: httpx.Client) -> None:
    taken = threading.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await wait_until_async(taken.is_set)  # the second is sent only when the first has arrived
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream.handlers[CHAT] = events
    with client.stream("POST", CHAT, json=BODY) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 1"
        taken.set()
        assert [line for line in lines if line] == ["data: [DONE]"]


def test_a_stream_that_breaks_does_not_look_whole_and_is_not_asked_for_again(
    upstream: Upstream, client: httpx.Client
) -> None:
    taken = threading.Event()

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await wait_until_async(taken.is_set)  # it breaks only when the first has arrived
        assert request.transport is not None
        request.transport.abort()
        return response

    upstream.handlers[CHAT] = breaks
    with client.stream("POST", CHAT, json=BODY) as answer:
        pieces = answer.iter_raw()
        assert next(pieces).startswith(b"data: 1")
        taken.set()
        with pytest.raises(httpx.TransportError):
            list(pieces)
    assert len(upstream.seen) == 1


def test_a_client_that_hangs_up_frees_the_gateway(
    upstream: Upstream, client: httpx.Client, door: Relay
) -> None:
    hung_up = threading.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            hung_up.set()
            raise
        return web.Response()

    upstream.handlers[CHAT] = endless
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=BODY, timeout=1.0)
    assert hung_up.wait(30)
    wait_until(lambda: door.stats().active == 0, what="the request is over")
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7453",
        "127.0.0.1.evil.example",
        "169.254.169.254",
        "",
        "0.0.0.0",
        "127.0.0.1@evil.example",
        "evil.example#127.0.0.1",
        "[::1",
        "[::ffff:127.0.0.1].evil.example",
    ],
)
def test_g13_another_host_is_refused(client: httpx.Client, upstream: Upstream, host: str) -> None:
    answer = client.post(CHAT, json=BODY, headers={"Host": host})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "refused_by_relay"
    assert not upstream.seen


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example:7453",
        "file://",
        "http://[",
        "localhost",
    ],
)
def test_g13_a_page_of_another_site_is_refused(client: httpx.Client, upstream: Upstream, origin: str) -> None:
    assert client.post(CHAT, json=BODY, headers={"Origin": origin}).status_code == 403
    assert not upstream.seen


@pytest.mark.parametrize("headers", [{"Host": "localhost:8000"}, {"Origin": "http://localhost:3000"}])
def test_this_computers_own_names_may_pass(client: httpx.Client, headers: dict[str, str]) -> None:
    assert client.post(CHAT, json=BODY, headers=headers).status_code == 200


def test_the_door_is_no_general_proxy(client: httpx.Client, upstream: Upstream) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port or 0, timeout=60)
    connection.request("GET", "http://169.254.169.254/latest", headers={"Host": "localhost"})
    assert connection.getresponse().status in (400, 403)
    assert not upstream.seen
    connection.close()


def test_a_body_beyond_the_bound_is_refused(
    client: httpx.Client, upstream: Upstream, door: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post(CHAT, content=b"x" * 3_000_000).json()["bytes"] == 3_000_000
    assert client.post(CHAT, content=b"x" * (relay.BODY_BYTES + 1)).status_code == 413
    assert door.stats().refused == 1 and len(upstream.seen) == 1


def test_the_default_port_or_the_next_free_one(upstream: Upstream) -> None:
    first, second = Relay(upstream.socket), Relay(upstream.socket)
    try:
        ports = first.start(), second.start()
        assert ports[0] >= relay.DEFAULT_PORT and ports[1] > ports[0]
    finally:
        first.stop()
        second.stop()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_with_a_hint(
    upstream: Upstream, door: Relay
) -> None:
    taken = door.start()
    with pytest.raises(PreflightError, match=f"port {taken}") as refused:
        Relay(upstream.socket, taken).start()
    assert refused.value.hint and refused.value.why


def test_it_listens_on_loopback_only(door: Relay) -> None:
    import psutil

    port = door.start()
    listening = [
        c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]


def test_stop_is_quick_and_harmless_when_repeated(
    upstream: Upstream, door: Relay, client: httpx.Client
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(300)
        return web.Response()

    upstream.handlers[CHAT] = endless
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, CHAT, json=BODY)
        wait_until(lambda: upstream.seen, what="the request is under way")
        begun = time.monotonic()
        door.stop()
        door.stop()
        assert time.monotonic() - begun < 60
        assert asked.result(timeout=60).status_code == 503


def test_200_at_once(upstream: Upstream, door: Relay) -> None:
    here: list[web.Request] = []
    all_are_here = asyncio.Event()

    async def meet(request: web.Request) -> web.Response:
        here.append(request)
        if len(here) == 200:
            all_are_here.set()
        await asyncio.wait_for(all_are_here.wait(), 60)
        return web.json_response({})

    upstream.handlers["/meet"] = meet
    root = f"http://127.0.0.1:{door.start()}"

    async def meet_all() -> list[int]:
        async def ask(session: aiohttp.ClientSession) -> int:
            async with session.post(f"{root}/meet", json=BODY) as answer:
                return answer.status

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session) for _ in range(200)))

    assert asyncio.run(meet_all()) == [200] * 200
    assert len(here) == 200


def test_its_health_is_an_http_answer(upstream: Upstream, door: Relay) -> None:
    door.start()
    wait_until(lambda: door.stats().connected, what="the gateway answers")
    stats: Any = door.stats()
    assert stats.latency_ms > 0


# ----------------------------------------------------------------- lost at each instant

LOSSES = ("head", "body", "sampled", "answer begun", "half the answer", "whole answer", "told to wait")


def losing(upstream: Upstream, instant: str) -> Any:
    """A gateway that loses each request's first connection at this instant, and samples once for an id."""
    hit: set[str] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        request_id = request.headers["x-slipway-request"]
        first = request_id not in hit
        hit.add(request_id)

        def lose() -> None:
            assert request.transport is not None
            request.transport.abort()

        if first and instant == "head":
            lose()
        await request.read()
        if first and instant == "body":
            lose()
            return web.Response()
        word = upstream.sampled.get(request_id) or f"word {len(upstream.sampled)}"
        upstream.sampled[request_id] = word
        if first and instant == "sampled":
            lose()
        if first and instant == "told to wait":
            return web.Response(status=503, headers={"Retry-After": "0"})
        response = web.StreamResponse(headers={"Content-Length": str(len(word))})
        await response.prepare(request)
        if first and instant == "answer begun":
            lose()
        await response.write(word[:3].encode())
        if first and instant == "half the answer":
            lose()
        await response.write(word[3:].encode())
        if first and instant == "whole answer":
            lose()
        return response

    return answer


@pytest.mark.parametrize("instant", LOSSES)
def test_g18_a_connection_lost_at_any_instant_makes_one_sample_and_no_error(
    upstream: Upstream, door: Relay, client: httpx.Client, instant: str
) -> None:
    upstream.handlers[CHAT] = losing(upstream, instant)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.post, CHAT, json={**BODY, "at": at}) for at in range(20)]
        answers = [it.result(timeout=60) for it in asked]

    assert [it.status_code for it in answers] == [200] * 20
    words = [it.text for it in answers]
    assert len(set(words)) == 20, "no answer for two"
    assert sorted(words) == sorted(upstream.sampled.values()), "no sample without its answer, none twice"
    # A whole answer may have arrived before its connection broke.
    assert door.stats().replays == 20 or instant in ("whole answer", "head")
    assert door.stats().given_up == 0
    # An answer is with its client before the relay has counted it.
    wait_until(lambda: door.stats().active == 0, what="no request is under way")


@pytest.mark.slow
def test_c46_g17_a_link_lost_again_and_again_during_200_rollouts_duplicates_nothing(
    upstream: Upstream, door: Relay, client: httpx.Client
) -> None:
    """A link lives until eight requests have come over it, so that a busy computer cuts none for ever."""

    async def slow(request: web.Request) -> web.Response:
        request_id = request.headers["x-slipway-request"]
        if request_id not in upstream.sampled:
            upstream.sampled[request_id] = f"word {len(upstream.sampled)}"
            await asyncio.sleep(0.03)
        came.release()
        return web.json_response({"word": upstream.sampled[request_id]})

    upstream.handlers[CHAT] = slow
    over, came = threading.Event(), threading.Semaphore(0)
    kills = []

    def kill() -> None:
        while not over.is_set():
            for _ in range(8):
                came.acquire(timeout=60)
            upstream.stop()
            over.wait(0.05)
            upstream.start()
            kills.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda at: client.post(CHAT, json={**BODY, "at": at}), range(200)))
    finally:
        over.set()
        came.release(8)
        killer.join()
    assert {it.status_code for it in answers} == {200}
    words = [it.json()["word"] for it in answers]
    assert len(words) == len(set(words)) == len(upstream.sampled) == 200
    assert kills and door.stats().given_up == 0


@pytest.mark.slow
def test_g05_a_gateway_that_stands_still_for_a_while_costs_nothing(
    upstream: Upstream, door: Relay, client: httpx.Client
) -> None:
    upstream.freeze(2.0)
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: client.post(CHAT, json={**BODY, "at": at}), range(16)))
    assert time.monotonic() - begun >= 1.0, "it did stand still"
    assert [it.status_code for it in answers] == [200] * 16
    assert len(upstream.sampled) == len({it.json()["answer"] for it in answers}) == 16
    assert door.stats().replays == door.stats().given_up == 0
