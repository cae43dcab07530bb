"""relay.py when a link is lost late: a stream has begun, a request is older than the patience."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from launcher.proxy import relay
from launcher.proxy.relay import Relay
from launcher.proxy.relay_connection import RelayServer
from launcher.proxy.relay_forward import RetryDeadline, UpstreamLostError
from tests.support.upstream import Upstream, upstream_in_a_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
ASK = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with upstream_in_a_folder() as upstream:
        yield upstream


async def begins(request: web.Request) -> web.StreamResponse:
    """One event, and then no other."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(300)
    return response


def stream_begun(port: int) -> tuple[socket.socket, bytes]:
    """A program that has the head and the first event of its stream."""
    program = socket.create_connection(("127.0.0.1", port), timeout=60)
    program.sendall(ASK)
    got = b""
    while b"data: 1" not in got:
        got += program.recv(65536)
    return program, got


def everything(program: socket.socket, got: bytes) -> bytes:
    """All that comes until the connection is closed."""
    with program:
        while piece := program.recv(65536):
            got += piece
    return got


def check_cut(answer: bytes) -> None:
    """One response, unfinished, and nothing written into its body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" in head.lower()
    assert body == b"9\r\ndata: 1\n\n\r\n"


class Outlived(RelayServer):
    """Its requests go on when their connection is closed: what asks again cannot count on being ended."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.handler_cancellation = False


@pytest.mark.parametrize("server", [RelayServer, Outlived])
def test_g17_a_stream_that_has_begun_is_closed_and_not_asked_again_when_the_gateway_stands_still(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, server: type[RelayServer]
) -> None:
    monkeypatch.setattr(relay, "RelayServer", server)
    monkeypatch.setattr(relay, "_PROBE_SECONDS", 0.2)
    monkeypatch.setattr(relay, "_PROBE_PERIOD_SECONDS", 0.1)
    upstream.handlers[CHAT] = begins
    door, thaws = Relay(upstream.socket, 0, replay_seconds=0.6), threading.Event()
    try:
        program, got = stream_begun(door.start())
        upstream.stand_still(thaws)
        check_cut(everything(program, got))
        thaws.set()
        wait_until(lambda: door.stats().active == 0, what="the request is over")
        wait_until(lambda: door.stats().connected, what="the gateway answers again")
        assert [path for _, path in upstream.seen] == [CHAT]
        assert (door.stats().replays, door.stats().given_up) == (0, 0), "it had its answer"
    finally:
        thaws.set()
        door.stop()


def test_g17_a_stream_that_is_open_when_the_door_closes_is_cut(upstream: Upstream) -> None:
    upstream.handlers[CHAT] = begins
    door = Relay(upstream.socket, 0)
    try:
        program, got = stream_begun(door.start())
        door.stop()
        check_cut(everything(program, got))
    finally:
        door.stop()


def test_g17_a_request_that_is_older_than_the_patience_is_asked_again_when_the_link_is_lost(
    upstream: Upstream,
) -> None:
    timeout_budget_seconds = 0.5

    async def lost_late(request: web.Request) -> web.Response:
        if len(upstream.seen) == 1:
            await asyncio.sleep(3 * timeout_budget_seconds)
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"ok": True})

    upstream.handlers[CHAT] = lost_late
    door = Relay(upstream.socket, 0, replay_seconds=timeout_budget_seconds)
    try:
        url = f"http://127.0.0.1:{door.start()}{CHAT}"
        begun = time.monotonic()
        answer = httpx.post(url, json={}, trust_env=False, timeout=60)
        assert time.monotonic() - begun > timeout_budget_seconds
        assert answer.status_code == 200, answer.text
        assert len(set(upstream.seen)) == 1 and len(upstream.seen) == 2
        assert door.stats().given_up == 0
    finally:
        door.stop()


AWAY = UpstreamLostError("cut")


def test_g17_patience_counts_from_the_first_loss_and_not_while_the_gateway_works() -> None:
    waiting = RetryDeadline(120.0)
    waiting.record_loss(0.0, 1000.0, AWAY)  # it worked for a thousand seconds, then the link was lost
    assert waiting.left == 120.0
    waiting.record_loss(1010.0, 1011.0, AWAY)  # eleven seconds later it is still away
    assert waiting.left == 109.0
    waiting.record_loss(1012.0, 2000.0, AWAY)  # it came back, worked, and was lost again
    assert waiting.left == 108.0
    waiting.record_loss(
        2001.0, 2050.0, UpstreamLostError("still", silent_since=2002.0)
    )  # and then stood still
    assert waiting.left == 58.0


def test_g17_a_gateway_that_stood_still_from_the_beginning_has_used_up_its_patience() -> None:
    waiting = RetryDeadline(120.0)
    waiting.record_loss(10.0, 131.0, UpstreamLostError("still", silent_since=5.0))
    assert waiting.left == -1.0


def test_g23_a_gateway_that_asks_to_be_asked_again_each_time_is_not_asked_for_hours() -> None:
    """It waits for an engine that is away, or for one more that this very request ends."""
    asks = UpstreamLostError("no engine was ready again within 120 s", after_seconds=0.0)
    waiting = RetryDeadline(180.0)
    waiting.record_loss(0.0, 120.0, asks)
    assert waiting.left == 180.0
    waiting.record_loss(122.0, 242.0, asks)
    assert waiting.left == 58.0
    waiting.record_loss(244.0, 364.0, asks)
    assert waiting.left < 0.0
