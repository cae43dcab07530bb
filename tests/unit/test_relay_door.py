"""relay.py before who has no token or speaks no HTTP: bounded memory and time, nothing repeated.

The relay is in a process of its own, so that its memory can be measured and its terminal read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.http import StreamWriter
from multidict import CIMultiDict

from launcher.proxy import relay_body, relay_connection, relay_forward, relay_receipts
from launcher.proxy.relay import Relay
from launcher.proxy.relay_body import BODY_BYTES
from launcher.proxy.relay_receipts import FOLLOWS, RECEIPT_HEADER
from runtime.shared import schema
from tests.support.relay_process import RelayProcess
from tests.support.upstream import Upstream, upstream_in_a_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

TOKEN = "a-token-that-stands-nowhere-else"
CHAT = "/v1/chat/completions"
HOST = "Host: localhost\r\n"
SHOWN = f"Authorization: Bearer {TOKEN}\r\n"
MEGABYTE = 1 << 20
POSTS = 40
POSTED_BYTES = 16 * MEGABYTE
HALF_OPEN = 400
MALFORMED_BODIES = 20
# Longer than all these bodies take to come, and than the time of who has not shown the token.
SILENT_SECONDS = 5.0
# What all of that may cost; the posts alone are 640 MB.
MOST_BYTES = 64 * MEGABYTE


@dataclass(frozen=True)
class RelayHere:
    """A relay of this process."""

    port: int


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with upstream_in_a_folder() as upstream:
        yield upstream


@pytest.fixture
def door(upstream: Upstream, tmp_path: Path) -> Iterator[RelayProcess]:
    door = RelayProcess(
        upstream.socket, TOKEN, tmp_path / "stderr", unproven_seconds=4.0, silent_seconds=SILENT_SECONDS
    )
    yield door
    door.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RelayProcess, Upstream]]:
    """For tests that leave it as it was."""
    with upstream_in_a_folder() as upstream:
        door = RelayProcess(upstream.socket, TOKEN, tmp_path_factory.mktemp("relay") / "stderr")
        yield door, upstream
        door.stop()


def connect(door: RelayProcess | RelayHere) -> socket.socket:
    return socket.create_connection(("127.0.0.1", door.port), timeout=60)


def answer_to(door: RelayProcess | RelayHere, sent: bytes) -> bytes:
    """All that comes until the relay closes."""
    got = b""
    with connect(door) as client, contextlib.suppress(ConnectionError):
        client.sendall(sent)
        while piece := client.recv(65536):
            got += piece
    return got


GET = f"GET /v1/models HTTP/1.1\r\n{HOST}{SHOWN}"
POST = f"POST {CHAT} HTTP/1.1\r\n{HOST}{SHOWN}"
MALFORMED = {
    "no method": f"{TOKEN}\r\n\r\n",
    "a header first": f"{SHOWN}GET /v1/models HTTP/1.1\r\n\r\n",
    "another protocol": f"GET /v1/models SPDY/{TOKEN}\r\n{HOST}\r\n",
    "no version": f"GET /v1/models?{TOKEN}\r\n{HOST}{SHOWN}\r\n",
    "a blank in a name": f"{GET}Bearer {TOKEN}: 1\r\n\r\n",
    "no colon": f"{GET}{TOKEN}\r\n\r\n",
    "a length that is none": f"{POST}Content-Length: {TOKEN}\r\n\r\n",
    "two lengths": f"{POST}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}",
    "a chunk that is none": f"{POST}Transfer-Encoding: chunked\r\n\r\n{TOKEN}\r\n",
    "a long line": f"GET /{TOKEN * 1000} HTTP/1.1\r\n{HOST}{SHOWN}\r\n",
    "a long header": f"{GET}X: {TOKEN * 1000}\r\n\r\n",
    "many headers": GET + f"X: {TOKEN}\r\n" * 2000 + "\r\n",
    "a target elsewhere": f"GET http://{TOKEN}/ HTTP/1.1\r\n{HOST}{SHOWN}\r\n",
    "a tunnel": f"CONNECT {TOKEN}:443 HTTP/1.1\r\n{HOST}{SHOWN}\r\n",
    "another host": f"GET /v1/models HTTP/1.1\r\nHost: {TOKEN}\r\n{SHOWN}\r\n",
    "another site": f"{GET}Origin: https://{TOKEN}\r\n\r\n",
    "a wrong token": f"GET /v1/models HTTP/1.1\r\n{HOST}Authorization: Bearer {TOKEN}x\r\n\r\n",
    "another scheme": f"GET /v1/models HTTP/1.1\r\n{HOST}Authorization: Basic {TOKEN}\r\n\r\n",
    "no token": f"GET /v1/models?{TOKEN} HTTP/1.1\r\n{HOST}\r\n",
    "an expectation": f"{POST}Expect: {TOKEN}\r\nContent-Length: 2\r\n\r\n{{}}",
    "too much": f"{POST}X: {TOKEN}\r\nContent-Length: {BODY_BYTES + 1}\r\n\r\n",
    "a path that is no text": f"GET /\x80{TOKEN} HTTP/1.1\r\n{HOST}{SHOWN}\r\n",
    "a header that is no text": f"{GET}X: \xff{TOKEN}\r\n\r\n",
    "zeros": "\x00" * 100 + TOKEN + "\r\n\r\n",
    "a TLS greeting": "\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03" + TOKEN + "\x00" * 200,
    "HTTP/2": f"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{TOKEN}",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=[*MALFORMED])
def test_g30_what_is_no_request_is_answered_as_openai_does_and_repeats_nothing(
    shared: tuple[RelayProcess, Upstream], sent: str
) -> None:
    door, upstream = shared
    end_to_end_headers = len(upstream.seen)
    got = answer_to(door, sent.encode("latin-1"))
    head, _, body = got.partition(b"\r\n\r\n")
    assert 400 <= int(head.split()[1]) < 500, got
    error = json.loads(body)["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["code"]
    assert TOKEN.encode() not in got
    assert httpx.get(f"{door.url}/healthz", trust_env=False, timeout=60).status_code == 200
    assert door.said.read_bytes() == b"", "nothing on the terminal"
    assert len(upstream.seen) == end_to_end_headers


@pytest.mark.parametrize("name", ["a long line", "a long header", "many headers"])
def test_r08_a_head_that_is_too_large_is_431(shared: tuple[RelayProcess, Upstream], name: str) -> None:
    head, _, body = answer_to(shared[0], MALFORMED[name].encode()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"431"
    assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"


def test_g30_bytes_after_a_request_are_the_last_that_is_read(shared: tuple[RelayProcess, Upstream]) -> None:
    got = b""
    with connect(shared[0]) as client, contextlib.suppress(ConnectionError):
        client.sendall(f"{GET}\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(f"{TOKEN}\r\n\r\n{GET}\r\n".encode())
        while piece := client.recv(65536):
            got += piece
    assert got.startswith(b"HTTP/1.0 400") and got.count(b"HTTP/1.") == 1 and TOKEN.encode() not in got
    assert shared[0].said.read_bytes() == b""


def test_g30_a_body_that_goes_on_malformed_is_refused_at_once(shared: tuple[RelayProcess, Upstream]) -> None:
    with connect(shared[0]) as client:
        client.sendall(f"{POST}Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 100")  # it is being read
        client.sendall(f"{TOKEN}\r\n".encode())
        got = client.recv(65536)
    assert got.startswith(b"HTTP/1.1 400") and TOKEN.encode() not in got
    assert shared[0].said.read_bytes() == b""


def test_g30_a_body_is_not_asked_for_before_the_token_is_shown(
    shared: tuple[RelayProcess, Upstream],
) -> None:
    for head, first in ((f"POST {CHAT} HTTP/1.1\r\n{HOST}", b"HTTP/1.1 401"), (POST, b"HTTP/1.1 100")):
        with connect(shared[0]) as client:
            client.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n".encode())
            assert client.recv(65536).startswith(first)


def test_g30_a_token_is_known_in_any_spelling_of_bearer(shared: tuple[RelayProcess, Upstream]) -> None:
    for shown in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "):
        got = answer_to(
            shared[0],
            f"GET /v1/models HTTP/1.1\r\n{HOST}Authorization: {shown}\r\nConnection: close\r\n\r\n".encode(),
        )
        assert got.startswith(b"HTTP/1.1 200"), shown


@pytest.mark.parametrize("name", ["api-key", "x-api-key"])
def test_r08_other_vendors_headers_show_the_token_as_well_and_go_on_as_authorization(
    shared: tuple[RelayProcess, Upstream], name: str
) -> None:
    door, upstream = shared
    get = f"GET /v1/models HTTP/1.1\r\n{HOST}Connection: close\r\n"
    for shown in (f"{name}: {TOKEN}x", f"{name}: {TOKEN}\r\nAuthorization: Bearer {TOKEN}x", f"{name}:"):
        assert answer_to(door, f"{get}{shown}\r\n\r\n".encode()).startswith(b"HTTP/1.1 401"), shown
    assert answer_to(door, f"{get}{name.upper()}: {TOKEN}\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    passed = CIMultiDict(upstream.headers[-1])
    assert passed["Authorization"] == f"Bearer {TOKEN}" and name not in passed


def test_a_refusal_on_anthropics_routes_has_anthropics_form(shared: tuple[RelayProcess, Upstream]) -> None:
    for path in ("/v1/messages?beta=true", "/rollouts/r/v1/messages/count_tokens", "/v1/messages/batches"):
        got = answer_to(shared[0], f"GET {path} HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        said = json.loads(got.split(b"\r\n\r\n", 1)[1])
        assert got.startswith(b"HTTP/1.1 401") and said["error"]["code"] == "invalid_api_key"
        in_its_form = (said.get("type"), said["error"]["type"]) == ("error", "authentication_error")
        assert in_its_form == (not path.endswith("batches"))


def post_without_end(door: RelayProcess) -> socket.socket:
    """A client without a token that sends some of its body, and stays."""
    client = connect(door)
    with contextlib.suppress(OSError):  # it is told to go, sooner or later
        client.sendall(f"POST {CHAT} HTTP/1.1\r\n{HOST}Content-Length: {BODY_BYTES}\r\n\r\n".encode())
        for _ in range(POSTED_BYTES // MEGABYTE):
            client.sendall(b" " * MEGABYTE)
    return client


def is_closed(client: socket.socket) -> bool:
    """Whether the relay has closed it; what it said before is passed over."""
    client.settimeout(0.01)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def passes(door: RelayProcess) -> bool:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.get(f"{door.url}/v1/models", headers=headers, trust_env=False, timeout=60).is_success


def test_g30_large_posts_that_never_end_cost_no_memory_without_a_token(
    door: RelayProcess, upstream: Upstream
) -> None:
    assert passes(door)
    before, most = door.bytes_held, 0
    clients = []
    for _ in range(POSTS):
        clients.append(post_without_end(door))
        most = max(most, door.bytes_held)
    assert most - before < MOST_BYTES, f"{(most - before) / MEGABYTE:.0f} MB"
    assert passes(door)
    wait_until(lambda: all(map(is_closed, clients)), what="all are closed")
    wait_until(lambda: door.connections == 0, what="and let go")
    assert {path for _, path in upstream.seen} == {"/v1/models"}


@pytest.mark.parametrize("shown", ["", SHOWN], ids=["without a token", "with it"])
def test_g30_what_follows_a_malformed_body_is_not_kept(door: RelayProcess, shown: str) -> None:
    """A refused client may go on for a while; each piece the parser refuses was held with its traceback."""
    assert passes(door)
    before, most = door.bytes_held, 0
    head = f"POST {CHAT} HTTP/1.1\r\n{HOST}{shown}Transfer-Encoding: chunked\r\n\r\n0\r\n".encode()
    clients = [connect(door) for _ in range(MALFORMED_BODIES)]
    for client in clients:
        client.settimeout(0.05)  # for one that is not read from any more
        with contextlib.suppress(OSError):
            client.sendall(head)
            for _ in range(POSTED_BYTES // MEGABYTE):
                client.sendall((b"X: " + b"a" * 1019 + b"\r\n") * 1024)
        most = max(most, door.bytes_held)
    assert most - before < MOST_BYTES, f"{(most - before) / MEGABYTE:.0f} MB"
    wait_until(lambda: all(map(is_closed, clients)), what="all are closed")
    assert passes(door)


def test_g30_connections_that_say_nothing_or_half_a_head_are_closed(door: RelayProcess) -> None:
    before, begun = door.bytes_held, time.monotonic()
    clients = [connect(door) for _ in range(HALF_OPEN)]
    for client in clients[::2]:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\n{HOST}".encode())
    assert passes(door)
    assert door.bytes_held - before < MOST_BYTES
    wait_until(lambda: all(map(is_closed, clients)), what="all are closed")
    wait_until(lambda: door.connections == 0, what="and let go")
    assert time.monotonic() - begun >= 2.0, "nobody was closed at once"
    assert passes(door)


def test_g30_who_shows_the_token_may_take_its_time(door: RelayProcess, upstream: Upstream) -> None:
    """Longer than who does not: the body comes in pieces, the next request after a pause."""
    with connect(door) as slow, connect(door) as nobody:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\n{HOST}{SHOWN}Content-Length: 2\r\n\r\n{{".encode())
        wait_until(lambda: is_closed(nobody), what="the other is closed")
        slow.sendall(b"}")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
        slow.sendall(f"GET /v1/models HTTP/1.1\r\n{HOST}{SHOWN}\r\n".encode())
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")
    assert [path for _, path in upstream.seen] == [CHAT, "/v1/models"]


# ------------------------------------------------------------------ what it shares with others


def test_the_relay_and_the_gateway_mean_the_same() -> None:
    """The relay has its own copies: it starts without the runtime's schema."""
    assert BODY_BYTES == schema.BODY_BYTES
    assert relay_forward.REQUEST_HEADER == schema.REQUEST_HEADER
    assert relay_forward._VERSION_HEADER == schema.VERSION_HEADER
    assert (RECEIPT_HEADER, FOLLOWS) == (schema.RECEIPT_HEADER, schema.RECEIPT_FOLLOWS)
    assert relay_receipts._MAX_BATCH <= schema.MOST_RECEIPTS


def test_what_the_relay_uses_of_aiohttp_that_is_not_public_is_there_still() -> None:
    """pyproject.toml holds aiohttp within the releases of which this is known."""
    slots = {name for base in web.RequestHandler.__mro__ for name in getattr(base, "__slots__", ())}
    assert {"_messages", "_current_request", "_loop", "max_headers"} <= slots

    async def server() -> web.Server:
        return web.Server(lambda _: asyncio.sleep(0, web.Response()), lingering_time=7)

    made = asyncio.run(server())
    assert made._kwargs["lingering_time"] == 7 and made._loop is not None
    assert StreamWriter.output_size == 0


# ------------------------------------------------------------------ bounds, in this process


@pytest.fixture
def near(upstream: Upstream) -> Iterator[RelayHere]:
    relay = Relay(upstream.socket, 0, token=TOKEN)
    yield RelayHere(relay.start())
    relay.stop()


def test_g30_a_body_that_stands_still_is_given_up(near: RelayHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_body, "_IDLE_SECONDS", 0.2)
    got = answer_to(near, f"{POST}Content-Length: 100\r\n\r\n{{".encode())
    assert got.startswith(b"HTTP/1.1 408") and b"request_timeout" in got


def test_g30_a_body_that_comes_byte_by_byte_is_given_up_as_well(
    near: RelayHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < relay_body._IDLE_SECONDS < relay_body._TOTAL_SECONDS <= 600
    monkeypatch.setattr(relay_body, "_TOTAL_SECONDS", 0.5)
    with connect(near) as client:
        client.settimeout(0.05)
        client.sendall(f"{POST}Content-Length: 2000\r\n\r\n".encode())
        got, sent = b"", 0
        while not got and sent < 2000:
            with contextlib.suppress(TimeoutError):
                got = client.recv(65536)
            if not got:
                client.sendall(b" ")
                sent += 1
    assert got.startswith(b"HTTP/1.1 408") and b"request_timeout" in got
    assert sent > 1, "it did not stand still"


def test_g30_a_connection_on_which_nothing_comes_any_more_is_closed(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of who has shown the token, too; not as soon as of who has not."""
    assert relay_connection.UNAUTHENTICATED_SECONDS < relay_connection._IDLE_SECONDS <= 600
    monkeypatch.setattr(relay_connection, "_IDLE_SECONDS", 0.3)
    relay = Relay(upstream.socket, 0, token=TOKEN)
    try:
        got = answer_to(RelayHere(relay.start()), f"{GET}\r\n".encode())  # until the relay closes
    finally:
        relay.stop()
    assert got.startswith(b"HTTP/1.1 200")


def test_g30_of_too_many_who_show_no_token_the_oldest_goes(
    near: RelayHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_connection, "MAX_UNAUTHENTICATED", 3)
    with connect(near) as proven:
        proven.sendall(f"{GET}\r\n".encode())
        assert proven.recv(65536).startswith(b"HTTP/1.1 200")
        nobodies = [connect(near) for _ in range(5)]
        wait_until(lambda: [is_closed(one) for one in nobodies] == [True, True, False, False, False])
        proven.sendall(f"{GET}\r\n".encode())
        assert proven.recv(65536).startswith(b"HTTP/1.1 200")
    for one in nobodies:
        one.close()
