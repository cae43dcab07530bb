"""What OpenAI's clients send and expect, and this gateway answers or refuses with the way out.

The engine is a pretend one that remembers what it was asked. What a real one makes of it: test_gateway.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from openai import NotFoundError, OpenAI

from runtime.gateway.http.bodies import BodyReader
from runtime.shared.schema import BODY_BYTES
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.support.upstream import Upstream

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOO_LONG = (
    "This model's maximum context length is 1024 tokens. However, your prompt contains 2000 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
)


@dataclass
class Engine:
    """Answers what it is given to answer; `bodies`: what it was asked, in order."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    refusal: dict[str, Any] | None = None
    # Its answer where it has tools; of a stream, the parts of it.
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.bodies[-1]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None:
            return web.json_response({"error": self.refusal}, status=400)
        said: dict[str, Any] = {"role": "assistant", "content": "oui"}
        if self.calls:
            said |= {"tool_calls": self.calls}
        if body.get("stream"):
            return web.Response(body=_events(body, {"delta": said}), content_type="text/event-stream")
        choices = [_choice(index, {"message": said}) for index in range(body.get("n") or 1)]
        return web.json_response({"id": "c", "prompt_token_ids": [1, 2], "choices": choices, "usage": USAGE})

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        logprobs = {"token_logprobs": [-1.0, -1.0, -1.0]}
        prompts = range(len(body["prompt"]) if isinstance(body["prompt"], list) else 1)
        choices = [_choice(index, {"text": str(index), "prompt_token_ids": [1, 2]}) for index in prompts]
        choices = [choice | {"logprobs": logprobs} for choice in choices]
        return web.json_response({"id": "c", "choices": choices, "usage": USAGE})


def _choice(index: int, said: dict[str, Any]) -> dict[str, Any]:
    tokens = [{"token": "x", "logprob": -1.0} for _ in range(3)]
    ended = {"finish_reason": "stop", "token_ids": [3, 4, 5]}
    return {"index": index, "logprobs": {"content": tokens}, **ended, **said}


def _events(body: dict[str, Any], said: dict[str, Any]) -> bytes:
    first = {"id": "c", "prompt_token_ids": [1, 2], "choices": [_choice(0, said)]}
    parts = [first, {"id": "c", "choices": [], "usage": USAGE}]
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


async def _well(request: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Path, Engine]]:
    engine = Engine()
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        handlers = {CHAT: engine.chat, COMPLETION: engine.completion, "/collective_rpc": _well}
        upstream = Upstream(Path(folder) / "e.sock", handlers)
        upstream.start()
        yield upstream.socket, engine
        upstream.close()


@pytest.fixture(scope="module")
def gateway(started: tuple[Path, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    running = Gateway(folder, started[0], folder).until_ready()
    yield running
    running.stop()


@pytest.fixture
def engine(started: tuple[Path, Engine]) -> Engine:
    started[1].bodies.clear()
    started[1].refusal = None
    started[1].calls = []
    return started[1]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer that must be one."""
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": SCHEMA, **function}}


# ------------------------------------------------------------------ models


def test_models_are_retrieved_by_every_name_that_is_listed(gateway: Gateway) -> None:
    before = time.time() - 24 * 3600
    for prefix in ("", "/rollouts/r"):
        door = httpx.HTTPTransport(uds=gateway.config["socket_dir"] + "/gateway.sock")
        http = httpx.Client(transport=door)
        with OpenAI(
            base_url=f"http://x{prefix}/v1", api_key=TOKEN, http_client=http, max_retries=0
        ) as client:
            listed = list(client.models.list())
            assert {"policy", "policy@v0", "base"} == {model.id for model in listed}
            for name in [*(model.id for model in listed), "openai/policy"]:
                found = client.models.retrieve(name)
                assert (found.id, found.object) == (name, "model")
                assert before < found.created <= time.time()
            with pytest.raises(NotFoundError, match="does not exist"):
                client.models.retrieve("gpt-4o")


# ------------------------------------------------------------------ the token


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bearer "])
def test_g13_the_case_of_the_scheme_means_nothing(gateway: Gateway, scheme: str) -> None:
    for token, status in ((TOKEN, 200), (TOKEN.upper(), 401), (TOKEN + "x", 401), ("", 401)):
        answer = gateway.http.get("/v1/models", headers={"Authorization": f"{scheme} {token}".strip()})
        assert answer.status_code == status, (scheme, token)


@pytest.mark.parametrize(
    "path", [f"/{TOKEN}/v1/models", f"/v1/models/{TOKEN}", f"/rollouts/{TOKEN}/v1/chat/completions",
             f"/slipway/checkpoints/{TOKEN}/pin", f"/slipway/status?key={TOKEN}", f"/v1/{TOKEN}"]
)  # fmt: skip
def test_g30_a_token_in_the_address_is_neither_answered_nor_written_down(gateway: Gateway, path: str) -> None:
    for method in ("GET", "POST"):
        answer = gateway.http.request(method, path, json={"model": "policy", "messages": MESSAGES})
        assert refused(answer)["code"] == "api_key_in_address"
        assert TOKEN not in answer.text + str(answer.headers)
    assert TOKEN not in "".join(path.read_text() for path in gateway.folder.glob("samples/*"))
    assert TOKEN not in (gateway.folder / "gateway.log").read_text()


def test_g30_nobody_without_the_token_learns_by_the_address_whether_it_is_right(gateway: Gateway) -> None:
    for path in (f"/{TOKEN}/v1/models", "/wrong/v1/models"):
        error = refused(gateway.http.get(path, headers={"Authorization": "Bearer wrong"}), 401)
        assert error["code"] == "invalid_api_key"
    assert gateway.http.get(f"/healthz?key={TOKEN}", headers={"Authorization": ""}).status_code == 200


def test_g30_a_route_that_is_not_there_is_not_repeated_and_those_that_are_are_named(gateway: Gateway) -> None:
    answer = gateway.http.get("/sk-somebodys-secret/v1/models")
    assert "GET /v1/models" in refused(answer, 404)["message"]
    assert "sk-somebodys-secret" not in answer.text
    assert refused(gateway.http.get(CHAT), 405)["message"] == (
        "this route does not take GET; use POST /v1/chat/completions"
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "no such route; use POST /v1/chat/completions. .* ends with /v1"),
        ("POST", "/rollouts/r-1/chat/completions", 404, "no such route; use POST /rollouts/{rollout}/v1/c"),
        ("GET", "/rollouts/r-1/v1/chat/completions", 405, ".* GET; use POST /rollouts/{rollout}/v1/chat/c"),
        ("GET", "/rollouts/r-1/slipway/status", 404, "this route is not under /rollouts/ID; use GET /s"),
        ("POST", "/v1/models/Qwen/Qwen3-8B", 405, ".* not take POST; use GET /v1/models/{model}$"),
        ("PUT", "/slipway/steps", 405, "this route does not take PUT; use .*POST /slipway/steps"),
        ("GET", "/models", 404, "no such route; use GET /v1/models. A client's base URL ends with /v1"),
        ("GET", "http://x//models", 404, "no such route; use GET /v1/models. A client's base URL"),
        ("GET", "/v1//models", 404, "the path has a slash too many; use GET /v1/models$"),
        ("GET", "/health", 404, "no such route; use GET /healthz"),
        ("POST", "/v1/models", 405, "this route does not take POST; use GET /v1/models$"),
        ("POST", "/v1/v1/messages", 404, "the path has /v1 twice: the base URL of Anthropic's clients"),
        ("GET", "/v1/images", 404, "no such route; use GET /v1/models, POST /v1/chat/completions, POST"),
    ],
)  # fmt: skip
def test_n15_a_wrong_path_or_method_gets_the_route_that_was_meant(
    gateway: Gateway, method: str, path: str, status: int, message: str
) -> None:
    said = refused(gateway.http.request(method, path, json={}), status)["message"]
    assert re.match(message, said), said


# ------------------------------------------------------------------ bodies


def packed(gateway: Gateway, content: bytes, encoding: str, path: str = CHAT) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return gateway.http.post(path, content=content, headers=headers)


def test_a_packed_body_is_read_on_every_route(gateway: Gateway, engine: Engine) -> None:
    body = json.dumps({"model": "policy", "messages": MESSAGES}).encode()
    for content, encoding in (
        (gzip.compress(body), "gzip"),
        (zlib.compress(body), "deflate"),
        (gzip.compress(zlib.compress(body)), "deflate, gzip"),
        (body, "identity"),
    ):
        assert packed(gateway, content, encoding).status_code == 200, encoding
        assert engine.last["messages"] == MESSAGES
    step = json.dumps({"key": "k", "groups": []}).encode()
    assert (
        "groups, or examples"
        in refused(packed(gateway, gzip.compress(step), "gzip", "/slipway/steps"))["message"]
    )


def test_a_body_that_cannot_be_unpacked_is_refused_by_name(gateway: Gateway) -> None:
    whole = gzip.compress(b'{"model": "policy"}')
    for content, encoding, status in (
        (b"{}", "gzip", 400), (whole[:-9], "gzip", 400), (whole + whole, "gzip", 400), (b"{}", "br", 415),
    ):  # fmt: skip
        error = refused(packed(gateway, content, encoding), status)
        assert error["param"] == "content-encoding"
    assert "gzip or deflate" in refused(packed(gateway, b"{}", "zstd"), 415)["message"]


@pytest.mark.parametrize("path", [CHAT, "/slipway/steps"])
def test_g30_a_body_is_bounded_on_every_route_packed_or_not(gateway: Gateway, path: str) -> None:
    bomb = gzip.compress(b" " * (BODY_BYTES + 1), 1)
    assert len(bomb) < BODY_BYTES / 100
    assert refused(packed(gateway, bomb, "gzip", path), 413)["code"] == "too_large"
    pieces = (b" " * 2**20 for _ in range(BODY_BYTES // 2**20 + 1))
    try:
        answer = gateway.http.post(path, content=pieces)
    except httpx.TransportError:
        return  # it hung up on what it will not read
    assert refused(answer, 413)["code"] == "too_large"


def test_g30_a_body_that_says_it_is_too_long_is_not_waited_for() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    for length in (str(BODY_BYTES + 1), "9" * 5000):
        scope = {"type": "http", "headers": [(b"content-length", length.encode())]}
        asyncio.run(BodyReader(None)(scope, None, send))
    assert [message["status"] for message in sent[::2]] == [413, 413]


# ------------------------------------------------------------------ fields


def test_several_greedy_answers_are_one_given_so_many_times(gateway: Gateway, engine: Engine) -> None:
    body = gateway.chat("greedy", n=4, temperature=0, logprobs=True).json()
    assert engine.last["n"] == 1
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice.pop("slipway")["sample"] for choice in body["choices"]}) == 4
    assert len({json.dumps(choice | {"index": 0}) for choice in body["choices"]}) == 1
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    assert gateway.counts("greedy")["samples"] == 4
    assert [line["samples"][0]["unscorable"] for line in gateway.recorded()[-1:]] == ["greedy"]


def test_several_greedy_answers_are_streamed_too(gateway: Gateway, engine: Engine) -> None:
    answer = gateway.chat(n=3, temperature=0, stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    said = {choice["index"]: choice["delta"]["content"] for event in events for choice in event["choices"]}
    assert said == {0: "oui", 1: "oui", 2: "oui"}
    assert events[-1]["usage"]["completion_tokens"] == 9


def test_several_greedy_answers_to_several_prompts_keep_their_order(gateway: Gateway, engine: Engine) -> None:
    ask = {"model": "policy", "prompt": ["a", "b"], "n": 2, "temperature": 0}
    body = gateway.http.post(COMPLETION, json=ask).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "0"), (1, "0"), (2, "1"), (3, "1"),
    ]  # fmt: skip


def test_answers_that_differ_are_still_the_engines_own(gateway: Gateway, engine: Engine) -> None:
    assert len(gateway.chat(n=2, temperature=0.5).json()["choices"]) == 2
    assert engine.last["n"] == 2


def test_what_asks_for_nothing_is_answered(gateway: Gateway, engine: Engine) -> None:
    assert gateway.chat(n=3, best_of=3, nobody_knows_this=None, thinking=None).status_code == 200
    assert not {"best_of", "nobody_knows_this", "thinking"} & engine.last.keys()
    refused(gateway.chat(nobody_knows_this=0))


def test_what_is_refused_says_what_to_do_instead(gateway: Gateway) -> None:
    assert "ask for n" in refused(gateway.chat(best_of=4))["message"]
    assert "prompt_logprobs" in refused(gateway.chat(echo=True))["message"]
    assert refused(gateway.chat(max_tokens=0))["param"] == "max_tokens"


def test_an_earlier_refusal_is_a_text_like_any_other(gateway: Gateway, engine: Engine) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    messages = [*MESSAGES, said, {"role": "user", "content": [{"type": "text", "text": "do"}]}]
    assert gateway.chat(messages=messages).status_code == 200
    assert engine.last["messages"] == messages


def test_g24_an_image_is_refused_by_its_place(gateway: Gateway) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    content = [{"type": "text", "text": "look"}, image]
    error = refused(gateway.chat(messages=[*MESSAGES, {"role": "user", "content": content}]))
    assert (error["param"], error["code"]) == ("messages", "unsupported_content")
    assert "messages[1].content[1] is of type 'image_url'" in error["message"]
    assert "text only" in error["message"]


def test_g24_a_text_that_names_media_by_an_id_is_none(gateway: Gateway) -> None:
    part = {"type": "text", "text": "a", "uuid": "x", "image_url": "http://169.254.169.254/latest"}
    assert refused(gateway.chat(messages=[{"role": "user", "content": [part]}]))["param"] == "messages"


@pytest.mark.parametrize(
    "said",
    [
        {"message": TOO_LONG, "param": "input_tokens", "code": 400},
        {"message": "Input length (2000) exceeds model's maximum context length (1024).", "code": 400},
        {"message": "The decoder prompt (length 1024) is longer than the maximum model length of 1024."},
        {"message": "max_tokens must be at least 1, got 0.", "param": "max_tokens", "code": 400},
    ],
)
def test_a_prompt_past_the_context_has_openais_code(
    gateway: Gateway, engine: Engine, said: dict[str, Any]
) -> None:
    engine.refusal = said
    for stream in (False, True):
        error = refused(gateway.chat(stream=stream))
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["message"] == said["message"]


def test_another_refusal_of_the_engines_keeps_its_own_words(gateway: Gateway, engine: Engine) -> None:
    engine.refusal = {
        "message": "max_tokens=9999 cannot be greater than max_model_len=512.",
        "param": "max_tokens",
    }
    error = refused(gateway.chat())
    assert (error["code"], error["param"]) == (None, "max_tokens")


# ------------------------------------------------------------------ tools


def test_c09_strict_tools_of_a_rollout_are_trained_and_the_answer_says_what_was_dropped(
    gateway: Gateway, engine: Engine
) -> None:
    """openai-agents sends `strict` with every tool of its own accord."""
    answer = gateway.chat("strict", tools=[tool(strict=True), tool(name="other")], seed=3)
    assert answer.status_code == 200
    assert answer.headers["x-slipway-ignored"] == "tools.strict, seed"
    assert engine.last["tools"] == [tool(), tool(name="other")]
    (line,) = [line for line in gateway.recorded() if line["tags"]["rollout"] == "strict"]
    assert line["samples"][0]["unscorable"] is None
    again = gateway.chat(headers={"x-slipway-rollout": "strict-too"}, tools=[tool(strict=True)])
    assert again.headers["x-slipway-ignored"] == "tools.strict"


def test_strict_tools_of_no_rollout_stay_strict(gateway: Gateway, engine: Engine) -> None:
    answer = gateway.chat(tools=[tool(strict=True)])
    assert "x-slipway-ignored" not in answer.headers
    assert engine.last["tools"] == [tool(strict=True)]


def called(place: int) -> dict[str, Any]:
    return {"id": f"c{place}", "type": "function", "function": {"name": "look", "arguments": f"[{place}]"}}


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_r01_one_call_at_a_time_is_what_the_client_gets_and_all_that_was_sampled_is_trained(
    gateway: Gateway, engine: Engine, stream: bool, calls: int
) -> None:
    """openai-agents sends it for agents that are to call one tool after the other."""
    name = f"one-{stream}-{calls}"
    engine.calls = [called(place) | ({"index": place} if stream else {}) for place in range(calls)]
    answer = gateway.chat(name, tools=[tool(strict=True)], parallel_tool_calls=False, stream=stream, n=1)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slipway-ignored"] == "tools.strict, parallel_tool_calls"
    assert "x-slipway-untrainable" not in answer.headers
    assert "parallel_tool_calls" not in engine.last and engine.last["tools"] == [tool()]
    whole = json.loads(answer.text.split("data: ")[1]) if stream else answer.json()
    said = whole["choices"][0]["delta" if stream else "message"]
    assert [call["id"] for call in said.get("tool_calls") or ()] == [f"c{it}" for it in range(calls)][:1]
    (line,) = [line for line in gateway.recorded() if line["tags"]["rollout"] == name]
    (sample,) = line["samples"]
    assert (sample["completion_ids"], sample["unscorable"]) == ([3, 4, 5], None)


def test_r01_of_no_rollout_the_engine_is_asked_for_one_call(gateway: Gateway, engine: Engine) -> None:
    engine.calls = [called(0), called(1)]
    answer = gateway.chat(tools=[tool()], parallel_tool_calls=False)
    assert "x-slipway-ignored" not in answer.headers and engine.last["parallel_tool_calls"] is False
    for others in ({"parallel_tool_calls": True}, {}):
        given = gateway.chat("several", tools=[tool()], **others).json()
        assert len(given["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("value", [0, "no", 0.0, []])
def test_r01_what_the_engine_would_take_for_one_call_is_refused(gateway: Gateway, value: Any) -> None:
    error = refused(gateway.chat("one", tools=[tool()], parallel_tool_calls=value))
    assert error["param"] == "parallel_tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("rollout", [None, "forced"])
def test_a_forced_call_is_held_to_the_tools_schema(
    gateway: Gateway, engine: Engine, choice: Any, rollout: str | None
) -> None:
    bare = {"type": "function", "function": {"name": "bare"}}
    answer = gateway.chat(rollout, tools=[tool(), bare], tool_choice=choice)
    assert answer.status_code == 200 and "x-slipway-ignored" not in answer.headers
    look, empty = engine.last["tools"]
    assert look == tool(strict=True)
    assert empty["function"] == {
        "name": "bare", "strict": True, "parameters": {"type": "object", "properties": {}},
    }  # fmt: skip


def test_a_forced_call_of_what_takes_no_object_is_refused(gateway: Gateway) -> None:
    for schema in ({"type": "string"}, {"type": ["object", "null"]}, {"type": 3}):
        error = refused(gateway.chat(tools=[tool(parameters=schema)], tool_choice="required"))
        assert error["param"] == "tools" and "'look'" in error["message"]
        assert gateway.chat(tools=[tool(parameters=schema)]).status_code == 200
