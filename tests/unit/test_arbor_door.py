"""The relay under `--arbor`: this user's own programs need no key, whoever else asks needs the run's.

A key that a program brings from elsewhere ends at the relay. The gateway is `tests/support/upstream.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from aiohttp import web

from launcher.proxy import relay_peers
from launcher.proxy.relay import Relay
from tests.support import canaries
from tests.support.environment import PROGRAMS, runtime_environ
from tests.support.relay_process import RelayProcess
from tests.support.upstream import Upstream, upstream_in_a_folder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-very-run"
# The user's own, of a provider.
CANARY = "sk-real-" + "c4n4ry" * 5
CHAT = "/v1/chat/completions"
FILES = "/v1/files"
STEP = "/slipway/steps"
RECEIPTS = "/slipway/receipts"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
ANOTHER_USER = 12345
OVERFLOW_USER = 65534
POSTS = 40
MEGABYTE = 1 << 20
MOST_BYTES = 64 * MEGABYTE


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RelayProcess, Upstream]]:
    with upstream_in_a_folder() as upstream:
        door = RelayProcess(upstream.socket, TOKEN, tmp_path_factory.mktemp("relay") / "stderr", keyless=True)
        yield door, upstream
        door.stop()


@pytest.fixture
def upstream(shared: tuple[RelayProcess, Upstream]) -> Upstream:
    upstream = shared[1]
    upstream.seen.clear()
    upstream.headers.clear()
    return upstream


@pytest.fixture
def door(shared: tuple[RelayProcess, Upstream], upstream: Upstream) -> RelayProcess:
    return shared[0]


def post(door: RelayProcess, path: str = CHAT, headers: dict[str, str] | None = None) -> httpx.Response:
    """A JSON body, unless the headers say another thing."""
    said = {"Content-Type": "application/json", **(headers or {})}
    return httpx.post(f"{door.url}{path}", content=b"{}", headers=said, trust_env=False, timeout=60)


def as_another(user: int, *words: str, sent: bytes = b"") -> object:
    """What `be_another_user.py` says. Only root, or who may become root, can be somebody else."""
    root = [] if os.geteuid() == 0 else [shutil.which("sudo") or "sudo", "-n", "-E"]
    program = PROGRAMS / "unit" / "be_another_user.py"
    command = [*root, "env", f"PYTHONPATH={runtime_environ()['PYTHONPATH']}", sys.executable, str(program)]
    done = subprocess.run(
        [*command, str(user), *words], input=sent, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"this test needs root, or sudo without a password: {done.stderr.decode()}"
    return json.loads(done.stdout)


def asked_by_another(door: RelayProcess, sent: bytes, times: int = 1) -> list[str]:
    got = as_another(ANOTHER_USER, "ask", str(door.port), str(times), sent=sent)
    assert isinstance(got, list)
    return got


# ------------------------------------------------------------------ who needs no key


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer arbor", "Bearer not-needed", f"Bearer {CANARY}", "Basic YTpi", "", f"Bearer {TOKEN}"],
)
def test_a12_a_program_of_this_user_needs_no_key_and_the_gateway_sees_only_the_runs(
    door: RelayProcess, upstream: Upstream, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    headers |= {"X-Api-Key": CANARY, "Api-Key": CANARY, "OpenAI-Organization": CANARY, "Cookie": CANARY}
    assert post(door, headers=headers).status_code == 200
    (seen,) = upstream.headers
    assert seen["Authorization"] == f"Bearer {TOKEN}"
    assert CANARY not in str(seen)


def test_a12_two_keys_in_one_request_are_both_left_behind(door: RelayProcess, upstream: Upstream) -> None:
    twice = [("Authorization", "Bearer arbor"), ("authorization", f"Bearer {CANARY}")]
    headers = [*twice, ("Content-Type", "application/json")]
    answer = httpx.post(f"{door.url}{CHAT}", content=b"{}", headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert upstream.headers[0]["Authorization"] == f"Bearer {TOKEN}" and CANARY not in str(upstream.headers)


def test_a12_a_post_without_a_body_passes(door: RelayProcess, upstream: Upstream) -> None:
    assert httpx.post(f"{door.url}{STEP}", trust_env=False, timeout=60).status_code == 200
    assert [path for _, path in upstream.seen] == [STEP]


def test_a12_the_openai_sdk_posts_its_files_as_a_form(door: RelayProcess, upstream: Upstream) -> None:
    http = httpx.Client(trust_env=False, timeout=60)
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key=CANARY, http_client=http, max_retries=0) as client:
        client.files.create(file=("data.jsonl", b'{"messages": []}\n'), purpose="fine-tune")
        client.models.list()
    assert [path for _, path in upstream.seen] == [FILES, "/v1/models"]
    assert upstream.headers[0]["Content-Type"].startswith("multipart/form-data")
    assert {seen["Authorization"] for seen in upstream.headers} == {f"Bearer {TOKEN}"}


def test_g13_without_arbor_every_key_but_the_runs_is_401(upstream: Upstream, tmp_path: Path) -> None:
    door = RelayProcess(upstream.socket, TOKEN, tmp_path / "stderr")
    try:
        for key in ("arbor", "not-needed", CANARY):
            assert post(door, headers={"Authorization": f"Bearer {key}"}).status_code == 401
        assert post(door).status_code == 401
        assert post(door, headers=SHOWN).status_code == 200
    finally:
        door.stop()


def test_c52_a_receipt_carries_the_runs_token_and_not_the_programs_key(tmp_path: Path) -> None:
    told: list[str] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"x-slipway-policy-version": "3"})

    async def receipts(request: web.Request) -> web.StreamResponse:
        told.append(request.headers["Authorization"])
        return web.Response(status=204)

    with upstream_in_a_folder({CHAT: chat, RECEIPTS: receipts}) as upstream:
        door = RelayProcess(upstream.socket, TOKEN, tmp_path / "stderr", keyless=True)
        try:
            assert post(door, headers={"Authorization": f"Bearer {CANARY}"}).status_code == 200
            wait_until(lambda: bool(told), what="the receipt")
        finally:
            door.stop()
    assert set(told) == {f"Bearer {TOKEN}"}


# ------------------------------------------------------------------ who needs the run's


def raw(path: str, *headers: str, body: bytes = b"{}") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


@pytest.mark.parametrize("key", ["", "Authorization: Bearer arbor", f"Authorization: Bearer {TOKEN}x"])
def test_a12_another_user_of_the_machine_gets_401(door: RelayProcess, upstream: Upstream, key: str) -> None:
    (got,) = asked_by_another(door, raw(STEP, *filter(None, [key])))
    assert got.startswith("HTTP/1.1 401") and "only programs of the user who started it" in got
    assert TOKEN not in got and not upstream.seen


def test_a12_another_user_with_the_runs_token_is_served_once_for_each_time_it_shows_it(
    door: RelayProcess, upstream: Upstream
) -> None:
    twice = raw(CHAT, f"Authorization: Bearer {TOKEN}") + raw(STEP)
    (got,) = asked_by_another(door, twice)
    assert got.count("HTTP/1.1 200") == 1 and got.count("HTTP/1.1 401") == 1
    assert [path for _, path in upstream.seen] == [CHAT]


def test_g30_unfinished_posts_of_another_user_cost_nothing(door: RelayProcess, upstream: Upstream) -> None:
    assert post(door).status_code == 200
    before = door.bytes_held
    unfinished = raw(CHAT, body=b"x" * 2 * MEGABYTE)[:-1]
    got = asked_by_another(door, unfinished, POSTS)
    assert all(not text or text.startswith("HTTP/1.1 401") for text in got)
    assert any(got), "who reads its answer finds it"
    assert door.bytes_held - before < MOST_BYTES
    wait_until(lambda: door.connections == 0, what="all are let go")
    assert [path for _, path in upstream.seen] == [CHAT]


BROWSERS = {
    "a page of this computer": {"Origin": "http://localhost:8888"},
    "a link": {"Sec-Fetch-Mode": "navigate"},
    "a page's picture": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"},
    "a spelling of its own": {"sec-FETCH-site": "none"},
}


@pytest.mark.parametrize("headers", BROWSERS.values(), ids=[*BROWSERS])
def test_g13_a_browser_of_this_user_needs_the_token(
    door: RelayProcess, upstream: Upstream, headers: dict[str, str]
) -> None:
    assert post(door, headers={**headers, "Authorization": "Bearer arbor"}).status_code == 401
    with httpx.Client(base_url=door.url, trust_env=False, timeout=60) as kept:
        assert kept.get("/v1/models").status_code == 200
        assert kept.get("/v1/models", headers=headers).status_code == 401, "also where a program was served"
    assert [path for _, path in upstream.seen] == ["/v1/models"]
    assert post(door, headers=headers | SHOWN).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7:7453", "my-laptop.local"])
def test_x14_another_name_of_this_computer_is_refused_as_ever(
    door: RelayProcess, upstream: Upstream, host: str
) -> None:
    assert post(door, headers={"Host": host}).status_code == 403
    assert post(door, headers={"Host": host} | SHOWN).status_code == 403
    assert not upstream.seen


WHAT_A_PAGE_CAN_POST = ["text/plain", "application/x-www-form-urlencoded", FORM["Content-Type"], "", "json"]


@pytest.mark.parametrize("kind", WHAT_A_PAGE_CAN_POST)
def test_g13_without_the_token_a_body_is_json(door: RelayProcess, upstream: Upstream, kind: str) -> None:
    answer = post(door, headers={"Content-Type": kind})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    assert not upstream.seen
    assert post(door, headers={"Content-Type": kind} | SHOWN).status_code == 200


# ------------------------------------------------------------------ whose a connection is


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def ends(connection: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    return connection.getsockname(), connection.getpeername()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv4 by an IPv6 socket"])
def test_a12_the_owner_is_the_clients_sockets_and_both_ways_of_asking_agree(
    listener: socket.socket, family: socket.AddressFamily
) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.socket(family) as client:
        client.connect((address, listener.getsockname()[1]))
        with listener.accept()[0] as connection:
            found = relay_peers._find_owner(*ends(connection))
            assert found == relay_peers._in_tables(*ends(connection))
            assert found == (os.geteuid(), os.fstat(client.fileno()).st_ino), "not our own end"
            assert relay_peers.is_this_users(*ends(connection))


@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
def test_a12_who_is_gone_belongs_to_nobody(listener: socket.socket, how: str) -> None:
    """The kernel shows such sockets as root's; these tests run as root."""
    client = socket.create_connection(listener.getsockname())
    with listener.accept()[0] as connection:
        own, peer = ends(connection)
        assert relay_peers.is_this_users(own, peer)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half closed":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        assert relay_peers._find_owner(own, peer) is None
        assert relay_peers._in_tables(own, peer) is None
        assert not relay_peers.is_this_users(own, peer)
    client.close()


def test_a12_a_socket_that_listens_where_the_client_was_is_not_the_client(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not relay_peers.is_this_users(listener.getsockname(), other.getsockname())


def test_a12_root_is_another_user_too_and_a_user_without_a_number_is_nobodys() -> None:
    assert as_another(ANOTHER_USER, "peers") == {"root": False, "own": True}
    assert as_another(OVERFLOW_USER, "peers") == {"root": False, "own": False}


def test_a12_a_connection_is_looked_up_once(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    real = relay_peers.is_this_users

    def counted(own: relay_peers.Address, peer: relay_peers.Address) -> bool:
        looks.append(real(own, peer))
        return looks[-1]

    monkeypatch.setattr(relay_peers, "is_this_users", counted)
    relay = Relay(upstream.socket, 0, token=TOKEN, keyless_option="--arbor")
    try:
        url = f"http://127.0.0.1:{relay.start()}"
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            for _ in range(20):
                assert client.get("/v1/models").status_code == 200
            assert looks == [True]
        assert httpx.get(f"{url}/v1/models", headers=SHOWN, trust_env=False, timeout=60).is_success
        assert looks == [True], "who shows the token is not looked up at all"
    finally:
        relay.stop()


# ------------------------------------------------------------------ nothing of a foreign key stays


def test_a12_a_foreign_key_is_nowhere_the_relay_writes(door: RelayProcess, upstream: Upstream) -> None:
    foreign = {"Authorization": f"Bearer {CANARY}"}
    assert post(door, headers=foreign).status_code == 200
    assert post(door, headers=foreign | {"Origin": "http://localhost"}).status_code == 401
    assert post(door, headers=foreign | {"Content-Type": "text/plain"}).status_code == 415
    asked_by_another(door, raw(CHAT, f"Authorization: Bearer {CANARY}"))
    assert not canaries.in_files([door.said.parent], [CANARY])
    assert CANARY not in str(upstream.headers) and door.said.read_bytes() == b""
