"""The door without an engine behind it: who gets in, what is listed, what is said while nothing is ready."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from launcher.proxy.relay import Relay
from runtime.gateway.gateway import build_app, build_components
from runtime.gateway.http.auth import BearerAuth
from runtime.shared import open_files
from runtime.shared.runtime_config import RuntimeConfig
from tests.runtime.conftest import REPOSITORY
from tests.runtime.gateway_process import TOKEN, Gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    running = Gateway(folder, None, folder)
    yield running
    running.stop()


# What vLLM itself serves: none of it may be reachable.
OF_VLLM = [
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/inference/v1/abort_requests",
    "/v1/chat/completions/render", "/metrics", "/health", "/server_info", "/sleep", "/wake_up",
    "/v1/embeddings", "/docs", "/openapi.json", "/version", "/pause", "/rollouts/r/slipway/status",
]  # fmt: skip


# In the place of what a route's path leaves open.
PARTS = {
    "rollout": "r", "step": 1, "name": "step-000001", "model": "policy", "file_id": "file-1",
    "job_id": "ftjob-1", "response": "resp_1",
}  # fmt: skip


@pytest.mark.slow
def test_g13_every_route_but_health_asks_for_the_token(gateway: Gateway, tmp_path: Path) -> None:
    config = RuntimeConfig.model_validate(gateway.config | {"state_dir": str(tmp_path)})
    app = build_app(build_components(config))
    routes = [
        (method, route.path_format.format(**PARTS))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    ]
    assert len(routes) >= 20
    wrong = [
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer token-of-the-test",
        "Basic dG9rZW4=",
        "bearer token-of-the-test",
        "bearer",
        "bearertoken-of-the-tests",
    ]
    stranger = httpx.Client(transport=httpx.HTTPTransport(uds=str(gateway.socket)), base_url="http://x")
    for method, path in [*routes, *(("POST", path) for path in OF_VLLM)]:
        if path == "/healthz":
            continue
        for name in ("api-key", "x-api-key"):
            assert stranger.request(method, path, headers={name: "wrong"}).status_code == 401, (method, path)
        for authorization in wrong:
            answer = gateway.http.request(method, path, headers={"Authorization": authorization})
            assert answer.status_code == 401, (method, path, authorization)
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


# Files that other processes, or the clock alone, write.
_MOVING = ("logs/", "supervisor.json", "gateway.json")


def _kept(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Each file's content and time."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: (path.read_bytes(), path.stat().st_mtime_ns)
        for name, path in paths.items()
        if not name.startswith(_MOVING)
    }


@pytest.mark.slow
def test_p16_no_get_changes_anything_so_that_none_without_a_key_may_act(
    gateway: Gateway, tmp_path: Path
) -> None:
    """Under --arbor this user's programs need no key, and a page in Safari may send a GET that looks like
    theirs."""
    config = RuntimeConfig.model_validate(gateway.config | {"state_dir": str(tmp_path)})
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    file = gateway.http.post(
        "/v1/files",
        files={"file": ("a.jsonl", line.encode())},
        data={"purpose": "fine-tune"},
        headers={"Authorization": f"Bearer {TOKEN}"},
    ).json()["id"]
    (gateway.folder / "lease").touch()
    paths = {
        route.path_format.format(**(PARTS | {"file_id": file}))
        for route in build_app(build_components(config)).routes
        if isinstance(route, Route) and "GET" in (route.methods or ())
    }
    assert len(paths) >= 10
    before = _kept(gateway.folder)
    assert "lease" in before and len(before) > 2
    answered = {}
    for path in sorted(paths):
        for method in ("GET", "HEAD"):
            answer = gateway.http.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
            answered[path] = answer.status_code
            assert _kept(gateway.folder) == before, f"{method} {path} changed something"
    assert list(answered.values()).count(200) >= 8, answered


@pytest.mark.slow
def test_r05_a_grammar_of_2000_tools_never_reaches_an_engine(gateway: Gateway) -> None:
    """There is no engine behind it: a request that passes would wait for one."""
    schema = {"type": "object", "properties": {"an_argument": {"type": "string", "description": "of it"}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}
        for number in range(2000)
    ]
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    answer = gateway.http.post(
        "/v1/chat/completions",
        json=body | {"tool_choice": "required"},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert error["param"] == "tools" and "characters for a grammar" in error["message"]


def test_g13_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def same(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return True

    monkeypatch.setattr(hmac, "compare_digest", same)
    answered: list[str] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        answered.append(scope["path"])

    scope = {"type": "http", "path": "/slipway/status", "headers": [(b"authorization", b"Bearer x")]}
    asyncio.run(BearerAuth(application, b"t")(scope, None, None))
    assert (compared, answered) == ([(b"Bearer x", b"Bearer t")], ["/slipway/status"])


@pytest.mark.parametrize(
    ("headers", "enters"),
    [
        ([(b"api-key", b"t")], True),
        ([(b"api-key", b"Bearer t")], False),
        ([(b"api-key", b"")], False),
        ([(b"api-key", b"t"), (b"authorization", b"Bearer x")], False),
        ([(b"api-key", b"x"), (b"authorization", b"Bearer t")], True),
    ],
)
def test_r08_azures_header_is_the_key_where_there_is_no_authorization(
    headers: list[tuple[bytes, bytes]], enters: bool
) -> None:
    statuses: list[int] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        statuses.append(200)

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "path": "/slipway/status", "headers": headers}
    asyncio.run(BearerAuth(application, b"t")(scope, None, send))
    assert statuses[0] == (200 if enters else 401)


def test_c37_no_part_of_ours_puts_an_engine_to_sleep() -> None:
    """vLLM's sleep frees weights and caches; it is off, and its routes are behind a door that lists none."""
    assert {"/sleep", "/wake_up"} <= set(OF_VLLM)
    sources = [*REPOSITORY.glob("runtime/**/*.py"), *REPOSITORY.glob("launcher/**/*.py")]
    assert len(sources) > 50
    for source in sources:
        text = source.read_text()
        assert not any(word in text for word in ('"/sleep', '"/wake_up', "enable-sleep-mode")), source


def test_health_says_nothing_beyond_ok(gateway: Gateway) -> None:
    answer = gateway.http.get("/healthz", headers={"Authorization": ""})
    assert (answer.status_code, answer.json()) == (200, {"ok": True})


@pytest.mark.parametrize("path", OF_VLLM)
def test_g13_what_is_not_listed_is_not_there(gateway: Gateway, path: str) -> None:
    for method in ("GET", "POST"):
        answer = gateway.http.request(method, path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.process
def test_r08_head_is_answered_as_get_without_the_body(gateway: Gateway) -> None:
    relay = Relay(gateway.socket, 0, token=TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        url = f"http://127.0.0.1:{relay.start()}"
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as through:
            for client in (gateway.http, through):
                for path in ("/healthz", "/v1/models", "/v1/models/no", "/v1/files", "/slipway/steps", "/no"):
                    get, head = client.get(path), client.head(path)
                    assert head.status_code == get.status_code, path
                    assert head.content == b"" and head.headers["content-type"] == "application/json"
                    assert head.headers["content-length"] == str(len(get.content)), path
                assert client.head("/v1/chat/completions").status_code == 405
    finally:
        relay.stop()


@pytest.mark.process
def test_r08_a_file_is_deleted_through_the_relay_as_at_openai(gateway: Gateway) -> None:
    relay = Relay(gateway.socket, 0, token=TOKEN)
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    try:
        url, http = f"http://127.0.0.1:{relay.start()}/v1", httpx.Client(trust_env=False)
        with openai.OpenAI(api_key=TOKEN, base_url=url, max_retries=0, http_client=http) as client:
            file = client.files.create(file=("a.jsonl", line.encode()), purpose="fine-tune").id
            deleted = client.files.delete(file)
            assert (deleted.id, deleted.object, deleted.deleted) == (file, "file", True)
            with pytest.raises(openai.NotFoundError):
                client.files.delete(file)
    finally:
        relay.stop()


def test_the_socket_is_its_users_alone(gateway: Gateway) -> None:
    socket = Path(gateway.config["socket_dir"]) / "gateway.sock"
    assert stat.S_IMODE(os.stat(socket).st_mode) == 0o600


def test_before_an_engine_is_up_a_request_is_told_when_to_come_back(gateway: Gateway) -> None:
    answer = gateway.chat()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "engines are loading" in answer.json()["error"]["message"]
    assert gateway.status()["phase"] == "starting"


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("chat/completions", b"{", None),
        ("chat/completions", b"[]", None),
        ("chat/completions", b"\xff\xfe", None),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}', "model"),
        ("chat/completions", b'{"model": "policy"}', "messages"),
        ("chat/completions", b'{"model": "policy", "messages": "a"}', "messages"),
        ("chat/completions", b'{"model": "policy", "messages": [{}], "stream": "yes"}', "stream"),
        ("completions", b'{"model": "policy"}', "prompt"),
        ("completions", b"[" * 100_000, None),
        ("chat/completions", b'{"a":' * 100_000, None),
        ("completions", b'{"model": "policy", "prompt": "\\ud800"}', None),
    ],
)
def test_a_malformed_body_is_the_clients_mistake(
    gateway: Gateway, path: str, content: bytes, param: str | None
) -> None:
    answer = gateway.http.post(f"/v1/{path}", content=content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-slipway-call", "-1"),
        ("x-slipway-call", "one"),
        ("x-slipway-purpose", "test"),
        ("x-slipway-rollout", "r" * 129),
        ("x-slipway-request", "a\u00e9"),
    ],
)
def test_a_malformed_tag_is_the_clients_mistake(gateway: Gateway, header: str, value: str) -> None:
    answer = gateway.chat(headers={header: value.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header


def test_a_model_nobody_serves_is_not_found(gateway: Gateway) -> None:
    for model in ("gpt-4o", "policy@v7", "policy@v-1", "policy@v0 ", "policy@v00", "policy@v" + "9" * 5000):
        answer = gateway.chat(model=model)
        assert answer.status_code == 404, model
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_step_that_is_malformed_says_which_part_is(gateway: Gateway) -> None:
    for body, param in (
        ({"key": "k", "groups": []}, None),  # neither groups nor examples: it is about both
        (
            {"key": "k", "groups": [{"id": "g", "members": [{"rollout": "r"}], "reward": 1}]},
            "groups.0.reward",
        ),
    ):
        answer = gateway.http.post("/slipway/steps", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "state", [b'{"a": "\\ud800"}', b'{"\\ud800": 1}', b'{"a": NaN}', b'{"a":' * 70 + b"1" + b"}" * 70]
)
def test_a_programs_state_is_json_that_everyone_can_read(gateway: Gateway, state: bytes) -> None:
    step = b'{"key": "k", "groups": [{"id": "g", "members": [{"rollout": "r"}]}], "client_state": %s}'
    for path, body in (("steps", step), ("checkpoints/x/restore", b'{"key": "k", "client_state": %s}')):
        answer = gateway.http.post(
            f"/slipway/{path}", content=body % state, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "client_state"


def test_nobody_is_sent_elsewhere(gateway: Gateway) -> None:
    for path in ("/slipway/steps/", "/slipway/status/", "/healthz/", "/v1/models/"):
        assert gateway.http.get(path, headers={"Host": "elsewhere"}).status_code == 404


def test_what_does_not_exist_is_not_found(gateway: Gateway) -> None:
    assert gateway.http.get("/slipway/steps/9").status_code == 404
    assert gateway.http.post("/slipway/checkpoints/step-000009/pin").status_code == 404
    body = {"key": "k"}
    assert gateway.http.post("/slipway/checkpoints/..%2F..%2Fetc/restore", json=body).status_code == 404
    assert (
        gateway.http.get("/slipway/metrics").json() == gateway.http.get("/slipway/checkpoints").json() == []
    )


def test_a_renewal_moves_the_leases_time_stamp(gateway: Gateway) -> None:
    lease = gateway.folder / "lease"
    lease.touch()
    os.utime(lease, (1, 1))
    assert gateway.http.put("/slipway/lease").json() == {"lease_left_seconds": 60.0}
    assert lease.stat().st_mtime > 1
    assert 0 < gateway.status()["lease_left_seconds"] <= 60


def test_a_gateway_without_a_token_does_not_start(tmp_path: Path) -> None:
    config = {"run_id": "r", "model_path": "m", "state_dir": str(tmp_path), "socket_dir": str(tmp_path)}
    (tmp_path / "runtime.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "runtime.gateway.gateway", "--config", tmp_path / "runtime.json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2 and "no token" in done.stderr


def test_g17_a_gateway_may_have_more_files_open_than_most_systems_give(tmp_path: Path) -> None:
    """A thousand rollouts in flight hold two each; what starts it has 1,024, as a shell over ssh does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        gateway = Gateway(tmp_path, None, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)[0]
    gateway.stop()
    assert most == (open_files.WANTED if hard == resource.RLIM_INFINITY else min(hard, open_files.WANTED))


def test_nothing_listens_beyond_unix_sockets(gateway: Gateway) -> None:
    inodes = {
        os.readlink(path) for path in Path(f"/proc/{gateway.process.pid}/fd").iterdir() if path.is_symlink()
    }
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{gateway.process.pid}/net/{table}").read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes


def test_a_client_that_hangs_up_half_way_harms_nothing(gateway: Gateway) -> None:
    half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(Path(gateway.config["socket_dir"]) / "gateway.sock"))
            connection.sendall(half.replace(b"Host", f"Authorization: Bearer {TOKEN}\r\nHost".encode()))
    assert gateway.http.get("/slipway/steps").status_code == 200
    assert "Traceback" not in (gateway.folder / "gateway.log").read_text()


def test_g24_nothing_is_fetched_for_a_client(gateway: Gateway) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    ):
        answer = gateway.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
