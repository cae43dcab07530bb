"""The endpoint as the `openai` SDK sees it, through the relay, on a real engine."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.support.launched import Launched, processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "the red cat"}]


@pytest.fixture(scope="module")
def variables(endpoint: Launched) -> dict[str, str]:
    """What `launch env` prints for this run."""
    command = [*endpoint.executable, "env", "shared"]
    done = subprocess.run(
        command,
        env={**os.environ, "LAUNCH_HOME": str(endpoint.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (
        line.removeprefix("export ").partition("=") for line in done.stdout.splitlines() if "LAUNCH_" in line
    )
    return {name: value.strip("'\"") for name, _, value in pairs}


@pytest.fixture(scope="module")
def client(variables: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=variables["LAUNCH_BASE_URL"], api_key=variables["LAUNCH_API_KEY"], timeout=600, max_retries=0
    ) as client:
        yield client


def test_models_lists_the_policy_and_its_version(client: openai.OpenAI) -> None:
    assert {"policy", "policy@v0"} <= {model.id for model in client.models.list()}


def test_chat_answers_and_names_the_version_that_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content
    assert answer.model == "policy@v0"
    assert answer.usage and answer.usage.completion_tokens > 0


def test_a_stream_spells_the_answer_of_the_same_request_unstreamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model="policy", messages=PROMPT, max_tokens=16, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content


def test_n_gives_that_many_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="policy", messages=PROMPT, n=4, max_tokens=24, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_tools_pass_through(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    answer = client.chat.completions.create(
        model="policy",
        messages=PROMPT,
        tools=[tool],  # type: ignore[list-item]
        tool_choice="none",
        max_tokens=8,
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_logprobs_come_when_asked_for_and_only_then(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(
        model="policy", messages=PROMPT, max_tokens=6, logprobs=True, top_logprobs=2
    )
    tokens = asked.choices[0].logprobs.content  # type: ignore[union-attr]
    assert tokens and all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    plain = client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=6)
    assert plain.choices[0].logprobs is None
    extra = plain.choices[0].model_extra or {}
    assert not extra.get("token_ids")


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="policy", prompt="le chat", max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text


def test_response_format_holds_the_answer_to_the_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="policy",
        messages=PROMPT,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    # The embedded model knows no JSON: the grammar lets it write white space to the limit, but nothing else.
    written = "".join((answer.choices[0].message.content or "").split())
    assert written and any(f'{{"a":"{value}"}}'.startswith(written) for value in "xy")


def test_seed_is_answered_and_the_engine_lives(client: openai.OpenAI, endpoint: Launched) -> None:
    before = _engine(endpoint).pid
    client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=4, seed=7)
    assert client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=4).choices
    assert _engine(endpoint).pid == before


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic abc"])
def test_a_missing_or_wrong_token_is_401(variables: dict[str, str], authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in [("GET", "/models"), ("POST", "/chat/completions")]:
        answer = httpx.request(method, variables["LAUNCH_BASE_URL"] + path, headers=headers, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["message"]


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=PROMPT)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"model":"policy"}',
        b'{"model":"policy","messages":3}',
        b'{"model":"policy","messages":[]}',
    ],
)
def test_a_malformed_body_is_400(variables: dict[str, str], body: bytes) -> None:
    headers = {"authorization": f"Bearer {variables['LAUNCH_API_KEY']}", "content-type": "application/json"}
    answer = httpx.post(variables["LAUNCH_BASE_URL"] + "/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"]


def test_a_route_that_is_not_listed_is_404(variables: dict[str, str]) -> None:
    headers = {"authorization": f"Bearer {variables['LAUNCH_API_KEY']}"}
    for path in ["/load_lora_adapter", "/embeddings", "/../collective_rpc", "/../server_info", "/../metrics"]:
        assert httpx.post(variables["LAUNCH_BASE_URL"] + path, headers=headers, json={}).status_code == 404, (
            path
        )


def test_g12_nothing_listens_beyond_loopback_and_doors_of_ours_are_unix_sockets(endpoint: Launched) -> None:
    sockets = Path(json.loads((endpoint.run_dir / "machine" / "runtime.json").read_text())["socket_dir"])
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    for name in ("gateway.sock", "engine-0.sock"):
        assert stat.S_IMODE((sockets / name).stat().st_mode) == 0o600, name
    port = int(endpoint.arguments[endpoint.arguments.index("--port") + 1])
    own = endpoint.process_handle()
    assert _listening(own) == {("127.0.0.1", port)}
    of_ours = []
    for process in processes_of(endpoint.run_id):
        command = " ".join(process.cmdline())
        addresses = {address for address, _ in _listening(process)} if process.pid != own.pid else set()
        # torch.distributed has loopback ports of its own, in the processes that import torch.
        assert addresses <= {"127.0.0.1"}, command
        if any(part in command for part in ("runtime.gateway.gateway", "runtime.keeper", "-m runtime ")):
            of_ours.append(command)
            assert not addresses, command
    assert len(of_ours) >= 3


def _listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Where a process listens for TCP or receives UDP."""
    found = process.net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.laddr and not one.raddr}


def test_an_engine_that_dies_is_restarted_and_the_request_is_answered(
    client: openai.OpenAI, endpoint: Launched
) -> None:
    engine = _engine(endpoint)
    engine.send_signal(signal.SIGKILL)
    answer = client.chat.completions.create(model="policy", messages=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert _engine(endpoint).pid != engine.pid


def test_status_and_logs_of_the_live_run(endpoint: Launched) -> None:
    environ = {**os.environ, "LAUNCH_HOME": str(endpoint.home)}
    status = subprocess.run(
        [*endpoint.executable, "--json", "status", "shared"], env=environ, capture_output=True, text=True
    )
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["schema"] == 1
    logs = subprocess.run(
        [*endpoint.executable, "logs", "shared"], env=environ, capture_output=True, text=True
    )
    assert logs.returncode == 0 and logs.stdout


def _engine(endpoint: Launched) -> psutil.Process:
    """The vLLM server process of the run (not the tether that holds it)."""

    def find() -> psutil.Process | None:
        for process in processes_of(endpoint.run_id):
            command = process.cmdline()
            if "runtime.engine.server" in command and "runtime.tether" not in command:
                return process
        return None

    found = wait_until(find, 180, "an engine of the run")
    assert isinstance(found, psutil.Process) and sys.platform == "linux"
    return found
