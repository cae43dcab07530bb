"""OpenAI's Responses API and Anthropic's Messages API, by their own SDKs, on a real engine.

What is sampled is recorded as a chat's is; the SDKs read every answer and every event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from tests.runtime.gateway_process import TOKEN, Gateway

pytestmark = pytest.mark.slow

QUESTION = "[[ ## english ## ]]\nthe black cat"
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"first": {"enum": [1, 2]}, "second": {"enum": [3, 4]}},
    "required": ["first", "second"],
}
FUNCTION: dict[str, Any] = {"type": "function", "name": "add", "parameters": ADD, "strict": False}
TOOL: dict[str, Any] = {"name": "add", "description": "Add two numbers.", "input_schema": ADD}
SHORT = 12
# Nearly always the same answer, which ends by itself, and one that may be trained.
COOL = 0.05


@pytest.fixture(scope="module")
def gateway(engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("gateway"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def no_blanks(engine) -> dict[str, Any]:
    """The tiny model has never seen a brace: left to itself it fills what is valid with white space."""
    vocabulary = json.loads((engine.model / "tokenizer.json").read_text())["model"]["vocab"]
    white = [number for token, number in vocabulary.items() if not token.strip("ĠĊĉč")]
    return {"logit_bias": {str(number): -100 for number in white}, "temperature": COOL}


def transport(gateway: Gateway) -> Any:
    return httpx.HTTPTransport(uds=str(gateway.socket))


@pytest.fixture
def responses(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The SDK's, in a rollout with the test's name."""
    base_url = f"http://x/rollouts/{request.node.name}/v1"
    with OpenAI(
        base_url=base_url,
        api_key=TOKEN,
        max_retries=0,
        http_client=httpx.Client(transport=transport(gateway)),
    ) as client:
        yield client.responses


@pytest.fixture
def messages(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The same of Anthropic's."""
    base_url = f"http://x/rollouts/{request.node.name}"
    with anthropic.Anthropic(
        base_url=base_url, api_key=TOKEN, max_retries=0, http_client=_client_of(anthropic, gateway)
    ) as client:
        yield client.messages


def _client_of(sdk: Any, gateway: Gateway) -> Any:
    """An HTTP client of the kind this SDK takes, on the gateway's socket."""
    client = sdk.DefaultHttpxClient.__mro__[-2]
    module = __import__(client.__module__.partition(".")[0])
    return module.Client(transport=module.HTTPTransport(uds=str(gateway.socket)))


def recorded(gateway: Gateway, rollout: str) -> list[dict[str, Any]]:
    return [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]


def assert_sampled(line: dict[str, Any], output_tokens: int, prompt_tokens: int) -> None:
    (sample,) = line["samples"]
    assert len(sample["completion_ids"]) == len(sample["logprobs"]) == output_tokens
    assert len(line["prompts"][0]) == prompt_tokens and sample["unscorable"] is None


# ------------------------------------------------------------------ Responses


def test_a_response_is_a_sample_and_the_next_goes_on_from_it(
    responses: Any, gateway: Gateway, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, Any] = {"model": "policy", "temperature": COOL}
    first = responses.create(
        input=QUESTION, instructions="Translate.", max_output_tokens=200, metadata={"a": "b"}, **settings
    )
    assert first.status == "completed" and first.output_text and first.model == "policy@v0"
    assert (first.instructions, first.metadata, first.store) == ("Translate.", {"a": "b"}, True)
    second = responses.create(
        input="and the dog", instructions="Translate.", previous_response_id=first.id,
        max_output_tokens=SHORT, **settings,
    )  # fmt: skip
    assert second.previous_response_id == first.id
    again = responses.create(
        input=[
            {"role": "developer", "content": "Translate."},
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "and the dog"},
        ],
        store=False, max_output_tokens=SHORT, **settings,
    )  # fmt: skip
    lines = recorded(gateway, request.node.name)
    for line, response in zip(lines, (first, second, again), strict=True):
        assert_sampled(line, response.usage.output_tokens, response.usage.input_tokens)
    sample = lines[0]["samples"][0]
    for line in lines[1:]:
        assert line["conversation"]["continues"] == sample["id"]
        assert line["prompts"][0][: len(lines[0]["prompts"][0])] == lines[0]["prompts"][0]
    assert lines[1]["prompts"] == lines[2]["prompts"]
    responses.create(  # as the ai-sdk goes on
        input=[
            {"role": "system", "content": "Translate."},
            {"role": "user", "content": QUESTION},
            *({"type": "item_reference", "id": item.id} for item in first.output),
            {"role": "user", "content": "and the dog"},
        ],
        max_output_tokens=SHORT, **settings,
    )  # fmt: skip
    assert recorded(gateway, request.node.name)[3]["prompts"] == lines[1]["prompts"]
    assert responses.retrieve(first.id) == first
    responses.delete(first.id)
    for name in (first.id, again.id):  # the one is deleted, the other was never kept
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(name)
    with pytest.raises(openai.BadRequestError) as refused:
        responses.create(input="more", previous_response_id=second.id, **settings)
    assert refused.value.code == "previous_response_not_found"


def test_an_answer_that_was_cut_off_is_incomplete(responses: Any) -> None:
    response = responses.create(
        model="policy", input=QUESTION, max_output_tokens=1, extra_body={"ignore_eos": True}
    )
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_response_make_the_whole_one(responses: Any, gateway: Gateway) -> None:
    with responses.stream(model="policy", input=QUESTION, max_output_tokens=200, temperature=COOL) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created", "response.in_progress", "response.completed"
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text != ""
    assert responses.retrieve(final.id).output_text == deltas
    assert final.usage.output_tokens > 0


def test_a_forced_call_comes_whole_and_in_events(responses: Any, no_blanks: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "policy", "input": QUESTION, "tools": [FUNCTION]}
    asked |= {"tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 200}
    asked |= {"extra_body": no_blanks}
    for item in responses.create(**asked).output:
        assert (item.type, item.name) == ("function_call", "add")
        assert {*json.loads(item.arguments)} == {"first", "second"}
    with responses.stream(**asked) as stream:
        events = list(stream)
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == done.arguments and {*json.loads(done.arguments)} == {"first", "second"}


def test_the_logprobs_that_are_asked_for_come(responses: Any) -> None:
    response = responses.create(
        model="policy", input=QUESTION, max_output_tokens=SHORT, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens and len(logprobs[0].top_logprobs) == 2


REFUSED_RESPONSES = {
    "input": [{"input": 3}, {"input": []}, {"input": [{"type": "item_reference", "id": "x"}]}],
    "input ": [{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}],
    "tools": [{"tools": [{"type": "web_search"}]}, {"tools": [3]}],
    "background": [{"background": True}],
    "conversation": [{"conversation": "conv_1"}],
    "text.format": [{"text": {"format": {"type": "xml"}}}],
    "nonsense": [{"nonsense": 1}],
    "model": [{"model": 3}],
}
CASES = [(param.strip(), fields) for param, several in REFUSED_RESPONSES.items() for fields in several]


@pytest.mark.parametrize(("param", "fields"), CASES)
def test_what_is_not_served_is_refused_by_name(gateway: Gateway, param: str, fields: dict[str, Any]) -> None:
    body = {"model": "policy", "input": QUESTION, "max_output_tokens": SHORT} | fields
    answer = gateway.http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


# ------------------------------------------------------------------ Messages


def test_a_message_is_a_sample_and_the_next_goes_on_from_it(
    messages: Any, gateway: Gateway, request: pytest.FixtureRequest
) -> None:
    asked: dict[str, Any] = {"model": "policy", "system": "Translate.", "extra_body": {"temperature": COOL}}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = messages.create(messages=turns, max_tokens=200, **asked)
    assert (first.role, first.stop_reason, first.model) == ("assistant", "end_turn", "policy@v0")
    assert first.content[0].type == "text" and first.content[0].text
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "and the dog"}]
    second = messages.create(messages=turns, max_tokens=SHORT, **asked)
    lines = recorded(gateway, request.node.name)
    for line, message in zip(lines, (first, second), strict=True):
        assert_sampled(line, message.usage.output_tokens, message.usage.input_tokens)
    assert lines[1]["conversation"]["continues"] == lines[0]["samples"][0]["id"]
    counted = messages.count_tokens(model="policy", system="Translate.", messages=turns[:1])
    assert counted.input_tokens == first.usage.input_tokens


def test_why_a_message_ended_is_said_as_anthropic_says_it(messages: Any) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}]}
    cool = {"temperature": COOL}
    cut = messages.create(max_tokens=1, extra_body={"ignore_eos": True}, **asked)
    assert cut.stop_reason == "max_tokens"
    stopped = messages.create(max_tokens=200, stop_sequences=["]]"], extra_body=cool, **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "]]")


def test_the_events_of_a_message_make_the_whole_one(messages: Any) -> None:
    with messages.stream(
        model="policy",
        max_tokens=200,
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={"temperature": COOL},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text != "" and final.stop_reason == "end_turn"
    assert final.usage.input_tokens > 0 and final.usage.output_tokens > 0


def test_a_forced_tool_is_used_whole_and_in_events(messages: Any, no_blanks: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "model": "policy", "max_tokens": 200, "tools": [TOOL], "extra_body": no_blanks,
        "tool_choice": {"type": "tool", "name": "add"}, "messages": [{"role": "user", "content": QUESTION}],
    }  # fmt: skip
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = [it for it in message.content if it.type == "tool_use"]
        assert message.stop_reason == "tool_use" and {*block.input} == {"first", "second"}


def test_errors_have_anthropics_form_whoever_refuses(gateway: Gateway, messages: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": SHORT, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(anthropic.NotFoundError, match="claude-x"):
        messages.create(model="claude-x", **asked)
    for fields, what in (
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"temperature": "hot"}, "temperature"),
    ):
        answer = gateway.http.post("/v1/messages", json={"model": "policy", **asked, **fields})
        said = answer.json()
        assert (answer.status_code, said["type"], said["error"]["type"]) == (
            400, "error", "invalid_request_error"
        ), said  # fmt: skip
        assert what in said["error"]["message"]
    stranger = gateway.http.post("/v1/messages", headers={"Authorization": "Bearer no"}, json=asked)
    assert stranger.json()["error"]["type"] == "authentication_error"


def test_a_key_in_anthropics_header_opens_the_door_and_a_thoughts_budget_is_said_to_be_ignored(
    gateway: Gateway,
) -> None:
    with httpx.Client(transport=transport(gateway), base_url="http://x") as http:
        body = {"model": "policy", "max_tokens": SHORT, "messages": [{"role": "user", "content": "a"}]}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 2000}}
        answer = http.post("/v1/messages", json=body, headers={"x-api-key": TOKEN})
    assert answer.status_code == 200, answer.text
    assert "thinking.budget_tokens" in answer.headers["x-slipway-ignored"]
