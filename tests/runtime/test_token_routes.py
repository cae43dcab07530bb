"""Token ids in, token ids out; the tokenizer's routes; a completion's echo. On a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.adapters import logprobs
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.runtime.test_from_text import step

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 12, "logprobs": 1, "temperature": 1.0}


@pytest.fixture(scope="module")
def gateway(engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("gateway"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def post(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = gateway.http.post(path, json={"model": "policy", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_ids(gateway: Gateway) -> list[int]:
    return post(gateway, "/tokenize", {"messages": MESSAGES})["tokens"]


def line_of(gateway: Gateway, rollout: str) -> dict[str, Any]:
    (line,) = [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]
    return line


# ------------------------------------------------------------------ /inference/v1/generate


def test_generated_ids_are_the_sample_and_the_next_prompt_is_one_sequence_with_it(gateway: Gateway) -> None:
    ids = prompt_ids(gateway)
    cool = SAMPLING | {"max_tokens": 200, "temperature": 0.05}  # it ends by itself
    body: dict[str, Any] = {"token_ids": ids, "sampling_params": cool | {"n": 2}}
    body["return_token_ids"] = True
    answer = post(gateway, f"/rollouts/tokens{GENERATE}", body)
    assert answer["output_mode"] == "tokens" and answer["model"] == "policy@v0"
    assert answer["prompt_token_ids"] == ids and answer["usage"]["prompt_tokens"] == len(ids)
    line = line_of(gateway, "tokens")
    assert line["prompts"] == [ids]
    for choice, sample in zip(answer["choices"], line["samples"], strict=True):
        assert choice["token_ids"] == sample["completion_ids"] and sample["unscorable"] is None
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == sample["logprobs"]
        assert [entry["token_id"] for entry in content] == sample["completion_ids"]
        assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        for entry in content:  # as vLLM's own: the sampled one first, and as many as were asked for
            assert [top["token_id"] for top in entry["top_logprobs"]] == [entry["token_id"]]
        assert choice["slipway"] == {"sample": sample["id"], "version": 0}
    first = answer["choices"][0]
    later = {"token_ids": ids + first["token_ids"] + ids, "sampling_params": cool}
    (second,) = post(gateway, f"/rollouts/tokens{GENERATE}", later)["choices"]
    names = [choice["slipway"]["sample"] for choice in (first, second)]
    members = [
        {"samples": names, "reward": 1.0},
        {"sample": answer["choices"][1]["slipway"]["sample"], "reward": 0.0},
    ]
    counts = step(gateway, "tokens", members)
    assert (counts["trained"], counts["turns_joined"], counts["sealed"]) == (3, 1, 0)


def test_a_stream_of_ids_is_the_whole_answer_in_parts(gateway: Gateway) -> None:
    ids = prompt_ids(gateway)
    body = {"model": "policy", "token_ids": ids, "sampling_params": SAMPLING, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = gateway.http.post(f"/rollouts/stream{GENERATE}", json=body | options).text
    *events, last, nothing = text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (sample,) = line_of(gateway, "stream")["samples"]
    assert [token for choice in choices for token in choice["token_ids"]] == sample["completion_ids"]
    given = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert [entry["logprob"] for entry in given] == sample["logprobs"]
    assert choices[-1]["finish_reason"] == sample["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(sample["completion_ids"])


def test_text_is_given_beside_the_ids_where_it_is_asked_for(gateway: Gateway) -> None:
    cool = SAMPLING | {"temperature": 0.05}
    body = {"token_ids": prompt_ids(gateway), "sampling_params": cool, "output_mode": "text"}
    (choice,) = post(gateway, GENERATE, body)["choices"]
    shown = post(gateway, "/detokenize", {"tokens": choice["token_ids"]})["prompt"]
    content = choice["logprobs"]["content"]
    assert choice["text"] and shown.startswith(choice["text"])
    assert "".join(entry["token"] for entry in content) == shown
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_without_a_limit_an_answer_has_the_runs_own_and_none_is_past_the_context(gateway: Gateway) -> None:
    (model,) = [one for one in gateway.http.get("/v1/models").json()["data"] if one["id"] == "policy"]
    context = model["max_model_len"]
    assert context == post(gateway, "/tokenize", {"prompt": "a"})["max_model_len"]
    prompt = [5] * (context - 20)
    for limit in ({}, {"max_tokens": context}, {"max_tokens": None}):
        sampling = {"ignore_eos": True, **limit}
        (choice,) = post(gateway, GENERATE, {"token_ids": prompt, "sampling_params": sampling})["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (20, "length")
        assert choice["logprobs"] is None


def test_what_this_route_does_not_serve_is_refused_by_name_and_the_rest_is_said(gateway: Gateway) -> None:
    body = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    for fields, param in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [[5]]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params"),
        ({"sampling_params": {"model": "base"}}, "sampling_params"),
        ({"sampling_params": {"thinking_token_budget": 3}}, "thinking_token_budget"),
        ({"content_parts": [{"type": "image_url", "url": "http://x"}]}, "content_parts"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"output_mode": "html"}, "output_mode"),
        ({"messages": []}, "messages"),
        ({"model": 3}, "model"),
        ({"sampling_params": {"logprobs": True}}, "sampling_params"),
        ({"token_ids": [5] * 1024}, "token_ids"),
    ):
        answer = gateway.http.post(GENERATE, json=body | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert gateway.http.post(GENERATE, json=body | {"model": "gpt-x"}).status_code == 404
    assert gateway.http.post(GENERATE, json=body | {"token_ids": [10**6]}).status_code == 400
    sampling = {"max_tokens": 2, "routed_experts_prompt_start": 7, "reasoning_effort": "low"}
    asked = {"model": None, "sampling_params": sampling | {"detokenize": True}, "priority": 3}
    answer = gateway.http.post(GENERATE, json=body | asked)
    assert (answer.status_code, answer.json()["model"]) == (200, "policy@v0")
    assert answer.headers["x-slipway-ignored"] == "priority, reasoning_effort, routed_experts_prompt_start"


def test_c09_settings_that_bend_the_distribution_bend_it_on_this_route_too(gateway: Gateway) -> None:
    sampling = SAMPLING | {"top_k": 3}
    post(gateway, f"/rollouts/bent{GENERATE}", {"token_ids": [5, 6], "sampling_params": sampling})
    assert line_of(gateway, "bent")["samples"][0]["unscorable"] == "top_k"


# ------------------------------------------------------------------ the tokenizer


def test_the_tokenizers_routes_speak_of_the_models_own_tokenizer(gateway: Gateway) -> None:
    text = "the black cat"
    answer = post(gateway, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert post(gateway, "/rollouts/r/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    without_name = gateway.http.post("/tokenize", json={"prompt": text}).json()
    assert without_name["tokens"] == answer["tokens"]
    info = gateway.http.get("/tokenizer_info").json()
    assert info["eos_token"] and "messages" in info["chat_template"]
    for path, body, param in (
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 500_001}, "tokens"),
        ("/tokenize", {"prompt": "a" * 2_000_001}, "prompt"),
    ):
        answer = gateway.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert gateway.http.post("/tokenize", json={"prompt": "a", "model": "gpt-x"}).status_code == 404


def test_messages_are_tokenised_as_their_chat_is(gateway: Gateway) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked = {"messages": MESSAGES, "tools": tools}
    chat = post(gateway, "/v1/chat/completions", asked | {"max_tokens": 1, "return_token_ids": True})
    answer = post(gateway, "/tokenize", asked | {"return_token_strs": False})
    assert answer["tokens"] == chat["prompt_token_ids"] and answer["count"] == len(answer["tokens"])
    long = post(gateway, "/tokenize", {"messages": [{"role": "user", "content": "a b " * 2000}]})
    assert long["count"] > long["max_model_len"], "who must shorten a prompt wants to know by how much"


# ------------------------------------------------------------------ echo


def as_lm_eval_asks(gateway: Gateway, prompts: Any, **fields: Any) -> list[dict[str, Any]]:
    """The choices for its request for loglikelihoods."""
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}
    return post(gateway, "/v1/completions", asked | fields)["choices"]


def test_echoed_logprobs_are_those_of_transformers(gateway: Gateway, engine: RunningEngine) -> None:
    prompts = [prompt_ids(gateway), prompt_ids(gateway)[::-1], [5, 6, 7]]
    for ids, choice in zip(prompts, as_lm_eval_asks(gateway, prompts), strict=True):
        given = choice["logprobs"]
        assert len(given["tokens"]) == len(given["token_logprobs"]) == len(ids) + 1
        assert given["token_logprobs"][0] is None
        expected = logprobs(engine.model, None, ids)
        assert given["token_logprobs"][1:-1] == pytest.approx(list(expected), abs=1e-3)
        assert choice["text"].startswith(post(gateway, "/detokenize", {"tokens": ids})["prompt"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logs", [None, 0])
def test_an_echo_is_of_the_prompt_and_the_sample_is_not(
    gateway: Gateway, stream: bool, logs: int | None
) -> None:
    rollout, text = f"echo-{stream}-{logs}", "the black cat"
    asked = {"model": "policy", "prompt": [text, "a"], "echo": True, "max_tokens": 5, "ignore_eos": True}
    asked |= {"logprobs": logs, "stream": stream}
    choices = 1 if stream and logs is not None else 2
    asked["n"] = choices
    answer = gateway.http.post(f"/rollouts/{rollout}/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    texts, counts = [""] * 2 * choices, [0] * 2 * choices
    for body in _bodies(answer):
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
            counts[choice["index"]] += len((choice["logprobs"] or {}).get("tokens", ()))
    assert all(shown.startswith(text) and shown != text for shown in texts[:choices])
    assert all(shown.startswith("a") for shown in texts[choices:])
    line = line_of(gateway, rollout)
    lengths = [len(line["prompts"][sample["prompt"]]) for sample in line["samples"]]
    assert counts == [0 if logs is None else length + 5 for length in lengths]
    for sample in line["samples"]:
        assert len(sample["completion_ids"]) == len(sample["logprobs"]) == 5
        assert sample["unscorable"] is None
    plain = post(gateway, "/v1/completions", asked | {"stream": False, "echo": False, "temperature": 0})
    greedy = post(gateway, "/v1/completions", asked | {"stream": False, "temperature": 0})
    for echoed, bare in zip(greedy["choices"], plain["choices"], strict=True):
        assert echoed["text"] == (text if bare["index"] < choices else "a") + bare["text"]


def _bodies(answer: httpx.Response) -> list[dict[str, Any]]:
    if not answer.text.startswith("data: "):
        return [answer.json()]
    *events, last, nothing = answer.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_prompt_alone_is_scored_without_a_sample(gateway: Gateway) -> None:
    ids = prompt_ids(gateway)
    asked = {"prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": True, "return_token_ids": True}
    (choice,) = post(gateway, "/rollouts/scored/v1/completions", asked)["choices"]
    assert choice["text"] == post(gateway, "/detokenize", {"tokens": ids})["prompt"]
    assert len(choice["logprobs"]["tokens"]) == len(ids) and choice["token_ids"] == []
    assert line_of(gateway, "scored")["samples"][0]["unscorable"] == "empty completion"
    (bare,) = post(gateway, "/v1/completions", asked | {"logprobs": None})["choices"]
    assert bare["logprobs"] is None and "prompt_logprobs" not in bare
    for fields, param in (
        ({"echo": "yes"}, "echo"),
        ({"truncate_prompt_tokens": 2}, "echo"),
        ({"echo": False}, "max_tokens"),
        ({"stream": True, "n": 2}, "echo"),
        ({"max_tokens": "0"}, "max_tokens"),
    ):
        answer = gateway.http.post("/v1/completions", json={"model": "policy", **asked, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
