"""The gateway in front of a real engine: what comes through, what is recorded, what a retry makes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from runtime.shared import process_table
from tests.runtime.conftest import running_in_engine
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.support.at_rest import AtRest, stands_still
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

# Long enough to be interrupted: some seconds on two cores.
LONG = {"max_tokens": 400, "ignore_eos": True}
RETRIED = "x-slipway-request"


@pytest.fixture(scope="module")
def gateway(engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("gateway"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


@pytest.fixture
def fresh(engine, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of the test's own, to be killed."""
    running = Gateway(tmp_path, engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def of_rollout(gateway: Gateway, rollout: str) -> list[dict[str, Any]]:
    return [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]


def test_a_chat_is_answered_under_the_versioned_name_and_recorded(gateway: Gateway) -> None:
    answer = gateway.chat("plain", temperature=0.7, max_completion_tokens=6)
    body = answer.json()
    assert answer.status_code == 200, body
    assert (body["model"], answer.headers["x-slipway-policy-version"]) == ("policy@v0", "0")
    assert isinstance(body["choices"][0]["message"]["content"], str)
    assert body["choices"][0]["logprobs"] is None and "prompt_token_ids" not in body
    (line,) = of_rollout(gateway, "plain")
    (sample,) = line["samples"]
    assert line["temperature"] == 0.7 and line["settings"]["max_completion_tokens"] == 6
    assert len(sample["completion_ids"]) == len(sample["logprobs"]) == body["usage"]["completion_tokens"]
    assert len(line["prompts"][0]) == body["usage"]["prompt_tokens"]
    assert sample["unscorable"] is None and sample["finish_reason"] == body["choices"][0]["finish_reason"]


def test_what_the_client_asks_for_comes_through(gateway: Gateway) -> None:
    body = gateway.chat(n=3, logprobs=True, top_logprobs=2, return_token_ids=True, temperature=1.0).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice in body["choices"]:
        tokens = choice["logprobs"]["content"]
        assert len(tokens) == len(choice["token_ids"]) and len(tokens[0]["top_logprobs"]) == 2
    assert body["prompt_token_ids"]


def test_completions_take_text_and_token_ids_one_or_many(gateway: Gateway) -> None:
    ask = {"model": "policy", "prompt": ["the cat", "the dog"], "max_tokens": 4, "temperature": 1.0}
    body = gateway.http.post("/rollouts/texts/v1/completions", json=ask).json()
    assert len(body["choices"]) == 2 and body["choices"][0]["logprobs"] is None
    (line,) = of_rollout(gateway, "texts")
    assert len(line["prompts"]) == 2 and [sample["prompt"] for sample in line["samples"]] == [0, 1]
    ids = line["prompts"][0]
    ask = {"model": "policy", "prompt": ids, "max_tokens": 4, "logprobs": 0, "ignore_eos": True}
    body = gateway.http.post("/rollouts/ids/v1/completions", json=ask).json()
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert of_rollout(gateway, "ids")[0]["prompts"] == [ids]


def test_the_openai_client_works_whole_and_streamed(gateway: Gateway) -> None:
    transport = httpx.HTTPTransport(uds=gateway.config["socket_dir"] + "/gateway.sock")
    with OpenAI(
        base_url="http://x/rollouts/sdk/v1", api_key=TOKEN, http_client=httpx.Client(transport=transport)
    ) as client:
        assert "policy" in {model.id for model in client.models.list()}
        whole = client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=8)  # type: ignore[call-overload]
        assert whole.choices[0].message.content is not None
        chunks = list(
            client.chat.completions.create(  # type: ignore[call-overload]
                model="policy", messages=MESSAGES, max_tokens=8, stream=True, n=2,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
        with pytest.raises(NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=MESSAGES)  # type: ignore[call-overload]
    whole_line, streamed = of_rollout(gateway, "sdk")
    assert (len(whole_line["samples"]), len(streamed["samples"])) == (1, 2)
    for sample in streamed["samples"]:
        assert len(sample["completion_ids"]) == len(sample["logprobs"]) > 0
    assert streamed["prompts"] == whole_line["prompts"]


def test_the_engines_own_refusal_is_passed_on(gateway: Gateway) -> None:
    for fields, param in (({"temperature": -1}, "temperature"), ({"max_tokens": 10**6}, "max_tokens")):
        answer = gateway.chat(**fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    answer = gateway.chat(best_of=4)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "best_of"


def test_a_seed_harms_no_engine(gateway: Gateway) -> None:
    assert gateway.chat(seed=7).status_code == 200
    assert gateway.chat().status_code == 200


def test_c09_a_grammar_comes_through_and_one_that_cannot_be_repeated_is_not_for_training(
    gateway: Gateway,
) -> None:
    for held, why in (
        ({"choice": ["oui", "non"]}, None),
        ({"grammar": 'root ::= "oui"'}, "structured_outputs"),
    ):
        answer = gateway.chat(why or "repeated", structured_outputs=held)
        assert answer.json()["choices"][0]["message"]["content"] in ("oui", "non")
        assert answer.headers.get("x-slipway-untrainable") == why
        assert of_rollout(gateway, why or "repeated")[0]["samples"][0]["unscorable"] == why


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_past_the_context_is_said_in_openais_words(gateway: Gateway, stream: bool) -> None:
    chat = gateway.chat(messages=[{"role": "user", "content": "the black cat " * 2000}], stream=stream)
    answers = [chat]
    for prompt in ([5] * 1024, [5] * 5000, "the black cat " * 2000):
        ask = {"model": "policy", "prompt": prompt, "stream": stream}
        answers += [gateway.http.post("/v1/completions", json=ask | more) for more in ({}, {"max_tokens": 4})]
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    fits = gateway.http.post("/v1/completions", json={"model": "policy", "prompt": [5] * 1023})
    assert fits.status_code == 200, fits.text


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}], ids=["required", "named"]
)
def test_a_forced_call_has_arguments_of_the_tools_schema(gateway: Gateway, engine, choice: Any) -> None:
    """The tiny model has never seen a brace: left to itself it fills what is valid with white space."""
    vocabulary = json.loads((engine.model / "tokenizer.json").read_text())["model"]["vocab"]
    white = {str(number): -100 for token, number in vocabulary.items() if not token.strip("ĠĊĉč")}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]
    asked = {"tools": tools, "tool_choice": choice, "logit_bias": white, "n": 12, "max_tokens": 200}
    body = gateway.chat(temperature=1.0, **asked).json()
    ended = [choice for choice in body["choices"] if choice["finish_reason"] != "length"]
    assert ended and all(choice["message"].get("tool_calls") for choice in ended), body["choices"]
    for call in (call for choice in body["choices"] for call in choice["message"].get("tool_calls") or ()):
        assert call["function"]["name"] == "paint"
        assert json.loads(call["function"]["arguments"]) in ({"colour": "red"}, {"colour": "blue"})


def test_c09_a_rollouts_strict_tools_leave_its_samples_fit_for_training(gateway: Gateway) -> None:
    tools = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR, "strict": True}}]
    answer = gateway.chat("strict", tools=tools, temperature=1.0)
    assert answer.status_code == 200 and answer.headers["x-slipway-ignored"] == "tools.strict"
    assert [line["samples"][0]["unscorable"] for line in of_rollout(gateway, "strict")] == [None]


def test_several_greedy_answers_are_given(gateway: Gateway) -> None:
    for stream in (False, True):
        assert gateway.chat(f"greedy-{stream}", n=3, temperature=0, stream=stream).status_code == 200
        (line,) = of_rollout(gateway, f"greedy-{stream}")
        ids = [sample["completion_ids"] for sample in line["samples"]]
        assert len(ids) == 3 and ids[0] and ids == [ids[0]] * 3


def test_who_names_no_limit_is_answered_whatever_the_context(gateway: Gateway) -> None:
    answer = gateway.chat(max_tokens=None, stop=[*" ent"])
    assert answer.status_code == 200, answer.text


def test_tags_are_read_from_headers_as_from_the_path(gateway: Gateway) -> None:
    headers = {
        "x-slipway-rollout": "tagged", "x-slipway-predictor": "translate", "x-slipway-call": "2",
        "x-slipway-purpose": "eval",
    }  # fmt: skip
    assert gateway.chat(headers=headers).status_code == 200
    (line,) = of_rollout(gateway, "tagged")
    assert line["tags"] == {"rollout": "tagged", "predictor": "translate", "call": 2, "purpose": "eval"}
    session = {"X-Session-ID": "by-session"}
    assert (
        gateway.chat("x-session-id", session).status_code == gateway.chat(headers=session).status_code == 200
    )
    assert len(of_rollout(gateway, "by-session")) == 1, "at the address for it alone"
    assert gateway.chat("X-Session-ID", session).status_code == 200
    assert len(of_rollout(gateway, "by-session")) == 2
    assert gateway.chat("x-session-id").status_code == 400


def test_c06_a_retried_request_makes_one_sample(fresh: Gateway) -> None:
    def ask() -> httpx.Response:
        return fresh.chat("retried", {RETRIED: "q-1"}, max_tokens=64, ignore_eos=True, temperature=1.0)

    with ThreadPoolExecutor(4) as pool:  # at once: they join the one in flight
        answers = [future.result() for future in [pool.submit(ask) for _ in range(4)]]
    answers.append(ask())  # afterwards: the stored answer
    fresh.kill()
    fresh.start()
    fresh.until_ready()
    answers.append(ask())  # by another process
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["x-slipway-policy-version"] for answer in answers}) == 1
    assert fresh.counts("retried")["samples"] == 1
    assert fresh.status()["samples"] == 1


def test_c06_a_streamed_answer_is_replayed_word_for_word(gateway: Gateway) -> None:
    first, again = [gateway.chat("replayed", {RETRIED: "q-stream"}, stream=True) for _ in range(2)]
    assert first.text.endswith("data: [DONE]\n\n") and first.text == again.text
    assert again.headers["content-type"].startswith("text/event-stream")
    assert gateway.counts("replayed")["samples"] == 1


def test_one_request_id_for_two_requests_is_refused(gateway: Gateway) -> None:
    assert gateway.chat(headers={RETRIED: "q-twice"}).status_code == 200
    answer = gateway.chat(headers={RETRIED: "q-twice"}, temperature=0.5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "request_id_reused")


def test_c06_an_aborted_stream_makes_no_sample_and_ends_in_the_engine(gateway: Gateway, engine) -> None:
    body = {"model": "policy", "messages": MESSAGES, "stream": True, **LONG}
    with gateway.http.stream("POST", "/rollouts/aborted/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_text()
        assert "data: " in next(pieces)
    wait_until(lambda: running_in_engine(engine) == 0)
    assert gateway.counts("aborted")["samples"] == 0
    assert of_rollout(gateway, "aborted") == []


def hang_up(gateway: Gateway, rollout: str, request: str | None, tokens: int = 400) -> None:
    """Ask for a long answer, and drop the connection while the engine works on it."""
    headers = {} if request is None else {RETRIED: request}
    with pytest.raises(httpx.ReadTimeout):
        gateway.http.post(
            f"/rollouts/{rollout}/v1/chat/completions",
            json={"model": "policy", "messages": MESSAGES, **LONG, "max_tokens": tokens},
            headers=headers,
            timeout=httpx.Timeout(10, read=0.15),
        )


def test_c06_a_lost_link_that_comes_back_makes_one_sample(gateway: Gateway) -> None:
    hang_up(gateway, "relinked", "q-link")
    answer = gateway.chat("relinked", {RETRIED: "q-link"}, **LONG)
    assert answer.status_code == 200
    assert gateway.counts("relinked")["samples"] == 1
    assert len(of_rollout(gateway, "relinked")) == 1


def test_c06_an_answer_nobody_waits_for_is_no_sample(gateway: Gateway, engine) -> None:
    hang_up(gateway, "hung-up", None)
    (core,) = process_table.children(engine.pid)
    os.kill(core, signal.SIGSTOP)
    try:  # the gateway has seen that nobody waits before there is an answer, within the grace a retry has
        wait_until(lambda: stands_still(core))
        hang_up(gateway, "never-back", "q-lost", tokens=8)
        wait_until(AtRest(gateway.process.pid), what="the gateway to have seen it")
    finally:
        os.kill(core, signal.SIGCONT)
    wait_until(lambda: running_in_engine(engine) == 0)
    wait_until(lambda: gateway.chat().status_code == 200)  # the gateway has had its turn
    for rollout in ("hung-up", "never-back"):
        assert gateway.counts(rollout)["samples"] == 0


def test_an_engine_that_dies_under_a_request_is_waited_for_and_asked_again(
    own_engine, tmp_path: Path
) -> None:
    first = own_engine()
    first.wait_until_ready()
    folder = tmp_path / "gateway"
    folder.mkdir()
    gateway = Gateway(
        folder, first.socket, Path(json.loads((first.log.parent / "runtime.json").read_text())["model_path"])
    )
    try:
        gateway.until_ready()
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(gateway.chat, f"r{index}", **LONG) for index in range(3)]
            wait_until(lambda: gateway.status()["phase"] == "ready")
            threading.Event().wait(0.3)
            first.process.kill()
            wait_until(lambda: gateway.status()["phase"] == "degraded")
            second = own_engine()
            gateway.point_to(second.socket)
            answers = [future.result() for future in asked]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert gateway.counts("r0", "r1", "r2")["samples"] == 3
        assert gateway.status()["phase"] == "ready"
    finally:
        gateway.stop()
