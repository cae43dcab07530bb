"""The translations of runtime/gateway/dialects, without a gateway: items, blocks, parts and events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from runtime.gateway.dialects import messages_answer, messages_request, responses_answer, responses_request
from runtime.gateway.dialects.chat_answer import ChatAnswer
from runtime.gateway.dialects.errors import AnthropicErrors
from runtime.gateway.dialects.messages_answer import MessageEvents
from runtime.gateway.dialects.response_store import ResponseStore, StoredResponse
from runtime.gateway.dialects.responses_answer import ResponseEvents
from runtime.gateway.http.openai_errors import CONTEXT_LENGTH, ApiError
from runtime.shared.anthropic_errors import in_anthropics_form

# The SDK's classes of events, by the type that each is of.
EVENTS: dict[str, Any] = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
HEAD = {"id": "chatcmpl-abc", "created": 3, "model": "policy@v1"}

texts = st.text(min_size=1, max_size=8)
pieces = st.lists(texts, max_size=3)
calls = st.lists(st.tuples(texts, pieces), max_size=3)


def chunks(thought: list[str], said: list[str], called: list[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """A chat answer as vLLM streams it."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": text} for text in thought] + [{"content": text} for text in said]
    for index, (name, arguments) in enumerate(called):
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": f"call-{index}", "function": function}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": text}}]} for text in arguments]
    found = [HEAD | {"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    ended = "tool_calls" if called else "stop"
    found.append(HEAD | {"choices": [{"index": 0, "delta": {}, "finish_reason": ended}]})
    return [*found, HEAD | {"choices": [], "usage": USAGE}]


def whole(thought: list[str], said: list[str], called: list[tuple[str, list[str]]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said) or None}
    if thought:
        message["reasoning"] = "".join(thought)
    if called:
        message["tool_calls"] = [
            {"id": f"call-{index}", "function": {"name": name, "arguments": "".join(arguments)}}
            for index, (name, arguments) in enumerate(called)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if called else "stop"}
    return HEAD | {"choices": [choice], "usage": USAGE}


def collected(answer: dict[str, Any]) -> ChatAnswer:
    found = ChatAnswer()
    for _ in found.take(answer):
        pass
    return found


def read(frames: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each has its own name in front."""
    found = []
    for frame in frames.split(b"\n\n")[:-1]:
        name, data, *comment = frame.decode().split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert comment == [": end"], "the relay knows the last event by it"
    return found


@settings(deadline=None)
@given(pieces, pieces, calls)
def test_the_events_of_any_response_are_the_sdks_and_end_in_the_whole_one(
    thought: list[str], said: list[str], called: list[tuple[str, list[str]]]
) -> None:
    request = responses_request.translate({"model": "policy", "input": "a", "stream": True})
    stream = ResponseEvents(request)
    frames = b"".join(b"".join(stream.feed(chunk)) for chunk in chunks(thought, said, called))
    events = read(frames + b"".join(stream.end()))
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    final = events[-1]["response"]
    assert final == responses_answer.response(request, collected(whole(thought, said, called)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    begun = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert begun == [item["id"] for item in done]
    assert Response.model_validate(final).output_text == "".join(said)


@settings(deadline=None)
@given(pieces, pieces, calls)
def test_the_events_of_any_message_add_up_to_the_whole_one(
    thought: list[str], said: list[str], called: list[tuple[str, list[str]]]
) -> None:
    stream = MessageEvents()
    frames = b"".join(b"".join(stream.feed(chunk)) for chunk in chunks(thought, said, called))
    events = read(frames + b"".join(stream.end()))
    expected = messages_answer.message(collected(whole(thought, said, called)))
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    inputs = [""] * len(blocks)
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[event["index"]]["signature"] = delta["signature"]
            elif delta["type"] == "input_json_delta":
                inputs[event["index"]] += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                blocks[event["index"]][field] += delta[field]
    for block, given_input in zip(blocks, inputs, strict=True):
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(given_input or "{}")
            except ValueError:
                block["input"] = {}
            if not isinstance(block["input"], dict):
                block["input"] = {}
    assert blocks == expected["content"]
    assert events[-2]["delta"] == {name: expected[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == expected["usage"] and events[-1] == {"type": "message_stop"}


def test_an_answer_comes_back_as_the_message_that_it_was() -> None:
    """So that the next turn goes on from it: by the items, by the blocks, and by the name of the response."""
    answer = collected(whole(["so"], ["hello "], [("add", ['{"a": ', "1}"]), ("add", ["{}"])]))
    message = answer.as_message()
    request = responses_request.translate({"model": "policy", "input": "a"})
    items = responses_answer.response(request, answer)["output"]
    again = responses_request.translate(
        {"model": "policy", "input": [{"role": "user", "content": "a"}, *items]}
    )
    assert again.chat["messages"] == [{"role": "user", "content": "a"}, message]
    blocks = messages_answer.message(answer)["content"]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "and?"}]
    asked = {"model": "policy", "max_tokens": 1, "messages": turns}
    theirs, _ = messages_request.translate(asked).chat["messages"]
    for call in (*message["tool_calls"], *theirs["tool_calls"]):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert theirs == message


def test_instructions_and_the_first_system_messages_are_one_and_later_ones_stay() -> None:
    body = {
        "model": "policy", "instructions": "one",
        "input": [
            {"role": "developer", "content": "two"}, {"role": "user", "content": "a"},
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "three"}]},
        ],
    }  # fmt: skip
    messages = responses_request.translate(body).chat["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "system"]
    assert messages[0]["content"] == "one\n\ntwo"


def test_results_of_tools_come_before_what_the_user_says_and_a_billing_line_is_left_out() -> None:
    results = [
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "c"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 77"}, {"type": "text", "text": "Be."}]
    body = {"model": "policy", "max_tokens": 1, "messages": [{"role": "user", "content": results}]}
    messages = messages_request.translate(body | {"system": system}).chat["messages"]
    assert messages == [
        {"role": "system", "content": "Be."},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


def test_two_texts_of_the_assistant_are_two_messages_and_its_calls_join_the_last() -> None:
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    messages = responses_request.translate({"model": "policy", "input": [*said, call]}).chat["messages"]
    assert [message["content"] for message in messages] == ["one", "two"]
    assert "tool_calls" not in messages[0] and messages[1]["tool_calls"][0]["id"] == "c"


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["input", "tools", "tool_choice", "text", "reasoning", "include", "instructions"]),
    st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "output_config"]),
)
def test_whatever_stands_in_a_field_is_translated_or_refused(value: Any, ours: str, theirs: str) -> None:
    told = {"model": "policy", "input": "a", "tools": [{"type": "function", "name": "a"}]}
    for body in ({ours: value}, {ours: [value]}, {ours: [{"role": "assistant", "content": value}]}):
        assert_translated_or_refused(responses_request.translate, told | body)
    told = {"model": "policy", "max_tokens": 1, "tools": [{"name": "a", "input_schema": {}}]}
    told["messages"] = [{"role": "user", "content": "a"}]
    for body in ({theirs: value}, {theirs: [value]}, {theirs: [{"role": "user", "content": value}]}):
        assert_translated_or_refused(messages_request.translate, told | body)


def assert_translated_or_refused(translate: Any, body: dict[str, Any]) -> None:
    try:
        translate(body)
    except ApiError as error:
        refused = error
    else:
        return
    assert refused.status == 400 and refused.param


def test_a_conversation_is_a_chain_that_outlives_the_process_and_the_oldest_go(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, most=3)
    before = None
    for number in range(4):
        name = f"resp_{number}"
        given_now = [{"role": "user", "content": f"q{number}"}]
        store.put(
            name, StoredResponse({"id": name}, given_now, {"role": "assistant", "content": "a"}, before)
        )
        before = name
    again = ResponseStore(tmp_path, most=3)
    for one in (store, again):
        assert one.conversation("resp_3") is None, "its first turn is gone"
        assert one.get("resp_0") is None and one.get("resp_3") is not None
        assert one.get("../runtime") is None and not one.delete("resp_9")
    assert again.delete("resp_3") and again.get("resp_3") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resp_1.json", "resp_2.json"]


def test_responses_that_name_each_other_are_no_conversation(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    for name, before in (("resp_a", "resp_b"), ("resp_b", "resp_a")):
        store.put(name, StoredResponse({}, [], {"role": "assistant", "content": ""}, before))
    assert store.conversation("resp_a") is None


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 503, 500, 502])
def test_an_error_keeps_what_was_said_of_it(status: int) -> None:
    given_error = {"message": "m", "type": "x", "param": None, "code": "c", "counts": {"a": 1}}
    found = in_anthropics_form(status, given_error)
    assert found["type"] == "error" and found["error"]["type"] != "x"
    assert {name: found["error"][name] for name in ("message", "code", "counts")} == {
        "message": "m", "code": "c", "counts": {"a": 1}
    }  # fmt: skip
    assert "param" not in found["error"]


CALL: dict[str, Any] = {"id": "c", "function": {"name": "rm", "arguments": ""}}


@pytest.mark.parametrize(
    ("arguments", "finish", "stop", "tokens", "reason", "status"),
    [
        ('{"a": 1}', "tool_calls", None, 4, "tool_use", "completed"),
        ("", "tool_calls", None, 4, "tool_use", "completed"),
        # At the limit, though a parser closed the call: nobody may run it.
        ('{"a": 1}', "tool_calls", None, 9, "max_tokens", "incomplete"),
        # No object for Anthropic's block; a response has the text as it was sampled.
        ('{"a": "/ho', "tool_calls", None, 4, "max_tokens", "completed"),
        ('{"a": 1e999}', "tool_calls", None, 4, "max_tokens", "completed"),
        ('{"a": 1}', "length", None, 9, "max_tokens", "incomplete"),
        ('{"a": "/ho', "tool_calls", "END", 4, "stop_sequence", "completed"),
        # A forced call that is whole is a call, whatever it stopped at.
        ('{"a": 1}', "stop", "END", 4, "tool_use", "completed"),
        ('{"a": 1}', "stop", None, 4, "tool_use", "completed"),
    ],
)
def test_a_call_that_was_cut_off_is_never_said_to_be_one(
    arguments: str, finish: str, stop: str | None, tokens: int, reason: str, status: str
) -> None:
    call = CALL | {"function": {"name": "rm", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
    answer = ChatAnswer(limit=9)
    for _ in answer.take(HEAD | {"choices": [choice], "usage": {"completion_tokens": tokens}}):
        pass
    assert messages_answer.message(answer)["stop_reason"] == reason
    asked = {"model": "policy", "input": "a", "max_output_tokens": 9}
    response = responses_answer.response(responses_request.translate(asked), answer)
    assert (response["status"], response["output"][-1]["status"]) == (status, status)


def test_items_of_one_answer_are_one_message_whatever_stands_between_its_calls() -> None:
    answer = ChatAnswer()
    deltas: list[dict[str, Any]] = [
        {"content": "Hi"},
        {"tool_calls": [{"index": 0, "id": "c0", "function": {"name": "a", "arguments": "{}"}}]},
        {"content": "\n"},
        {"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "b", "arguments": "{}"}}]},
    ]
    for delta in deltas:
        for _ in answer.take(HEAD | {"choices": [{"index": 0, "delta": delta}]}):
            pass
    request = responses_request.translate({"model": "policy", "input": "a"})
    items = responses_answer.response(request, answer)["output"]
    assert len(items) == 4
    asked = {"model": "policy", "input": [{"role": "user", "content": "a"}, *items]}
    assert responses_request.translate(asked).chat["messages"][1:] == [answer.as_message()]


def test_what_claude_code_sends_beside_is_taken_or_named_as_ignored() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "x-anthropic-billing-header: 1"},
        {"role": "system", "content": "first"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "redacted_thinking"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "a reminder"},
    ]  # fmt: skip
    body = {"model": "policy", "max_tokens": 1, "system": "Be.", "messages": messages}
    request = messages_request.translate(
        body | {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "diagnostics": {}}
    )
    assert request.ignored == ("context_management",)
    said = [(message["role"], message["content"]) for message in request.chat["messages"]]
    assert said == [("system", "Be.\n\nfirst"), ("user", "a"), ("assistant", "b"), ("user", "a reminder")]
    with pytest.raises(ApiError, match="ends with an answer"):
        messages_request.translate(body | {"messages": messages[:-1]})


def test_too_long_a_prompt_has_the_words_by_which_harnesses_shorten_it() -> None:
    async def too_long(scope: Any, receive: Any, send: Any) -> None:
        await ApiError(400, "maximum context length", code=CONTEXT_LENGTH).send(send)

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(AnthropicErrors(too_long)({"type": "http", "path": "/v1/messages"}, None, send))
    error = json.loads(sent[1]["body"])["error"]
    assert error["message"] == "prompt is too long: maximum context length"
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()


def test_the_store_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, most_bytes=2000)
    for number in range(9):
        store.put(f"resp_{number}", StoredResponse({"a": "x" * 500}, [], {}, None))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 2000 and store.get("resp_8") is not None
    assert ResponseStore(tmp_path, most_bytes=2000).get("resp_8") is not None
