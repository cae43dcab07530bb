"""What was sampled has a name: each choice says it, and by it, or by all that it said, it can be rewarded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from runtime.gateway.completions.answers import StreamedAnswer, WholeAnswer
from runtime.gateway.samples import content_key
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import select
from runtime.gateway.steps.step_records import digest_of, request_payload
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.schema import Group, Member, StepRequest
from runtime.shared.statuses import StepCounts
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import MESSAGES, TOKEN, Gateway
from tests.runtime.recorded import MESSAGES as ASKED
from tests.runtime.recorded import answer, asked, choice, record, record_choices, sampled
from tests.runtime.test_from_text import rows, step

CALL = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"a": 1, "b": [2]}'}}
TOOL = {"type": "function", "function": {"name": "paint"}}


def called(**function: Any) -> dict[str, Any]:
    """The call as a client may write it."""
    return CALL | {"function": CALL["function"] | function}


def calling(*calls: dict[str, Any], text: str | None = None) -> dict[str, Any]:
    """A choice of the engine's that calls tools."""
    message = {"role": "assistant", "content": text, "tool_calls": list(calls)}
    return choice([7, 8], [-1.0, -1.0]) | {"message": message, "finish_reason": "tool_calls"}


def events(*deltas: dict[str, Any]) -> bytes:
    """A choice of a stream of the engine's, as its events; the last has the finish."""
    parts = [
        {
            "index": 0,
            "delta": delta,
            "token_ids": [7],
            "finish_reason": "stop" if delta is deltas[-1] else None,
        }
        for delta in deltas
    ]
    bodies = [{"model": "base", "prompt_token_ids": [1], "choices": [part]} for part in parts]
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies)


def counts(store: SampleStore, *members: Member) -> StepCounts:
    groups = [Group(id="g", members=list(members))]
    return select(groups, store, taken=lambda _: False, staleness_of=lambda _: 0, max_staleness=2).counts


def of(*samples: str) -> list[Member]:
    return [Member(sample=one, reward=float(place)) for place, one in enumerate(samples)]


# ------------------------------------------------------------------ B1


@pytest.mark.parametrize("copies", [1, 3])
def test_b01_each_choice_says_which_sample_it_is_whole_and_streamed(tmp_path: Path, copies: int) -> None:
    request = asked("q", temperature=0, n=copies)
    whole = WholeAnswer(request, "policy@v4", answer([1], calling(CALL)), version=4)
    names = [{"sample": f"q:{index}", "version": 4} for index in range(copies)]
    assert [one["slipway"] for one in json.loads(whole.body)["choices"]] == names
    stream = StreamedAnswer(request, "policy@v4", version=4)
    deltas = [{"content": "x"}, {"tool_calls": [{"index": 0} | CALL]}, {}]
    given = [json.loads(event[6:])["choices"] for event in stream.feed(events(*deltas))]
    assert [[one.get("slipway") for one in choices] for choices in given] == [[None] * copies] * 2 + [names]
    # The very names that are recorded.
    store = SampleStore(tmp_path)
    ids = record(store, request, answer([1], calling(CALL)))
    assert ids == [name["sample"] for name in names]


def test_b01_a_run_may_name_none() -> None:
    assert "slipway" not in json.loads(
        WholeAnswer(asked(), "policy@v0", answer([1], choice([2], [-0.5]))).body
    )
    where = {"run_id": "r", "model_path": "m", "state_dir": "s", "socket_dir": "t"}
    assert RuntimeConfig(**where).name_samples is True


@pytest.fixture(scope="module")
def gateway(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("named"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def openai_of(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url="http://x/v1", api_key=TOKEN, http_client=gateway.http, max_retries=0)


@pytest.mark.slow
def test_b01_the_stock_openai_client_keeps_the_names_and_they_are_rewarded(gateway: Gateway) -> None:
    client = openai_of(gateway)
    names: list[dict[str, Any]] = []
    question: Any = {"model": "policy", "messages": MESSAGES, "max_tokens": 6, "temperature": 1.0}
    tools: Any = [TOOL]
    several: list[Any] = [{}, {"n": 2}, {"tools": tools}]
    for fields in several:
        whole = client.chat.completions.create(**question, **fields)
        names += [one.model_extra["slipway"] for one in whole.choices if one.model_extra]
        assert json.loads(whole.model_dump_json())["choices"][0]["slipway"] == whole.choices[0].slipway  # type: ignore[attr-defined]
    for chunk in client.chat.completions.create(**question, n=2, stream=True):
        for one in chunk.choices:
            extra = one.model_extra or {}
            assert bool(one.finish_reason) == ("slipway" in extra)
            names += [extra["slipway"]] if extra.get("slipway") else []
    prompts = ["the black cat", "the dog"]
    texts = client.completions.create(model="policy", prompt=prompts, max_tokens=6, temperature=1.0)
    names += [one.model_extra["slipway"] for one in texts.choices if one.model_extra]
    assert len(names) == 8 and all(name["version"] == 0 for name in names)
    members = [{"sample": it["sample"], "reward": float(number)} for number, it in enumerate(names)]
    given = step(gateway, "k", members)
    assert (given["trained"], given["dropped"]) == (8, {})
    lines = gateway.recorded()
    recorded = [
        line["prompts"][it["prompt"]] + it["completion_ids"] for line in lines for it in line["samples"]
    ]
    assert sorted(ids for ids, _ in rows(gateway, 1)) == sorted(recorded)


@pytest.mark.slow
def test_b01_a_replayed_answer_has_its_names_and_a_run_can_do_without(
    gateway: Gateway, engine: RunningEngine, tmp_path: Path
) -> None:
    for stream in (False, True):
        named = {"x-slipway-request": f"again {stream}"}
        first, again = (gateway.chat(headers=named, stream=stream).text for _ in range(2))
        assert first == again and f'"slipway":{{"sample":"again {stream}:0","version":0}}' in first
    silent = Gateway(tmp_path, engine.socket, engine.model, name_samples=False).until_ready()
    try:
        assert "slipway" not in silent.chat().text + silent.chat(stream=True).text
    finally:
        silent.stop()


# ------------------------------------------------------------------ B2


def test_b02_any_sample_can_be_rewarded_by_its_id(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    plain = choice([2], [-0.5])
    ids = [
        *record(store, asked(), answer([1], plain)),
        *record(store, asked(tools=[TOOL]), answer([1], calling(CALL))),
        *sampled(store, "r"),
        *record(store, asked(None, "r", tools=[TOOL]), answer([1], calling(CALL))),
        *record(store, asked(n=2), answer([1], plain, plain | {"index": 1})),
    ]
    for known in (store, SampleStore(tmp_path)):
        given = counts(known, *of(*ids))
        assert (given.samples, given.trained, given.dropped) == (6, 6, {})


def test_b02_what_cannot_be_rewarded_by_its_id_is_counted_by_a_reason(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    (held_out,) = sampled(store, "r", x_slipway_purpose="eval")
    (lost,) = record(store, asked("q", "r"), answer([1], choice([2], [-0.5])), delivered=False)
    (greedy,) = sampled(store, "r", temperature=0)
    (good,) = sampled(store, "s")
    for known in (store, SampleStore(tmp_path)):
        given = counts(known, *of(held_out, lost, greedy, good, good, "never:0"))
        assert given.dropped == {
            "evaluation": 1, "answer not received": 1, "greedy": 1, "named twice": 1, "no sample": 1,
        }  # fmt: skip
        assert (given.trained, given.unreceived) == (1, 1)
        assert given.trained + sum(given.dropped.values()) == given.samples + 2
    store.mark_received("q")
    assert counts(store, *of(lost)).trained == 1


def test_b02_a_sample_of_a_rollout_that_is_rewarded_too_is_trained_once(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    (first,) = sampled(store, "r")
    sampled(store, "r")
    (by_id,) = of(first)
    whole = Member(rollout="r", reward=1.0)
    for members in ([whole, by_id], [by_id, whole]):
        given = counts(store, *members)
        assert (given.samples, given.trained, given.dropped) == (3, 2, {"named twice": 1})


def test_b02_one_conversation_is_one_member_by_the_ids_of_its_answers(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    first, second = (*sampled(store, "r"), *sampled(store, None))
    (lost,) = record(store, asked("q"), answer([1], choice([2], [-0.5])), delivered=False)
    whole = Member(samples=[first, second, second], reward=1.0)
    given = counts(store, whole, Member(samples=[lost, "never:0", first], reward=0.0))
    assert (given.members, given.trained) == (2, 2)
    assert given.dropped == {"named twice": 2, "answer not received": 1, "no sample": 1}
    assert counts(store, Member(samples=["never:0"], reward=1.0)).dropped == {"no sample": 1}


def test_b02_a_call_has_one_name_however_it_is_written_and_streamed(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    request = asked(tools=[TOOL])
    (whole,) = record(store, request, answer([1], calling(CALL, text="so")))
    stream = StreamedAnswer(request, "policy@v0")
    begun = {"index": 0, "id": "c2", "type": "function", "function": {"name": "paint", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": it}} for it in ('{"b":', "[2],", ' "a":1}')]
    deltas = [{"content": "so"}, *({"tool_calls": [one]} for one in [begun, *parts]), {}]
    list(stream.feed(events(*deltas)))
    again = asked(tools=[TOOL])
    (streamed,) = record_choices(store, again, stream.choices, msgspec.Raw(b'""'), 0, delivered=True)
    for written in (
        CALL,
        called(arguments='{"b":[2],"a":1}'),
        called(arguments={"b": [2], "a": 1}),
        {"function": CALL["function"]},
    ):
        name = content_key.key(ASKED, "so", content_key.calls_of([written]))
        assert [ref.id for ref in store.of_content(name)] == [whole, streamed]
    others = [
        (None, "so"),
        ([CALL], ""),
        ([CALL, CALL], "so"),
        ([called(name="draw")], "so"),
        ([called(arguments='{"a": 1, "b": [3]}')], "so"),
        ([called(arguments='{"a": "1", "b": [2]}')], "so"),
        ([called(arguments='"{}"')], "so"),
        ([called(arguments='{"a": 1')], "so"),
    ]
    names = {content_key.key(ASKED, text, content_key.calls_of(calls)) for calls, text in others}
    assert len(names) == len(others) and not any(map(store.of_content, names))


def test_b02_calls_in_a_question_have_one_name_too() -> None:
    told = [{"role": "tool", "tool_call_id": "c1", "content": "done"}]
    written = [{"role": "assistant", "content": None, "tool_calls": [called(arguments='{"b":[2],"a":1}')]}]
    asked_first = [{"role": "assistant", "tool_calls": [CALL]}]
    assert content_key.key(asked_first + told, "ok") == content_key.key(written + told, "ok")
    assert content_key.key([{"role": "assistant", "content": "", "tool_calls": []}], "ok") == content_key.key(
        [{"role": "assistant", "content": ""}], "ok"
    )


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, "\ud800", ""])
def test_b02_arguments_nobody_can_parse_are_their_text(arguments: str) -> None:
    calls = [content_key.Call("paint", arguments)]
    assert content_key.key(ASKED, "", calls) == content_key.key(
        ASKED, "", [content_key.Call("paint", f"{arguments}\n")]
    )
    assert content_key.key(ASKED, "", calls) != content_key.key(
        ASKED, "", [content_key.Call("paint", arguments + "x")]
    )


def test_b02_a_member_says_its_calls_and_a_step_of_before_is_the_same_step() -> None:
    Member(messages=ASKED, tool_calls=[CALL], reward=1.0)
    Member(messages=ASKED, completion="so", tool_calls=[CALL])
    for fields in ({"messages": ASKED}, {"tool_calls": [CALL]}, {"sample": "s", "tool_calls": [CALL]}):
        with pytest.raises(ValueError, match="a member must have"):
            Member(**fields)
    groups = [Group(id="g", members=[Member(rollout="r", reward=1.0)])]
    before = {
        "groups": [
            {
                "id": "g", "predictor": None,
                "members": [
                    {
                        "rollout": "r", "messages": None, "completion": None, "sample": None,
                        "predictor": None, "call": None, "reward": 1.0, "failure": None,
                    }
                ],
            }
        ],
        "client_state": None,
    }  # fmt: skip
    assert digest_of(request_payload(StepRequest(key="k", groups=groups))) == digest_of(before)
    calling_now = [Group(id="g", members=[Member(messages=ASKED, tool_calls=[CALL], reward=1.0)])]
    said = request_payload(StepRequest(key="k", groups=calling_now))
    assert said["groups"][0]["members"][0]["tool_calls"] == [CALL]


@pytest.mark.slow
def test_b02_answers_that_call_tools_are_rewarded_by_what_they_say(
    gateway: Gateway, engine: RunningEngine
) -> None:
    """A call that is forced is no sample for training (C9), and found all the same."""
    vocabulary = json.loads((engine.model / "tokenizer.json").read_text())["model"]["vocab"]
    white = {str(number): -100 for token, number in vocabulary.items() if not token.strip("ĠĊĉč")}
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 1.0, "n": 8}
    for stream in (False, True):
        calls = calls_of_one(gateway.chat(stream=stream, logit_bias=white, **forced).text)
        member = {"messages": MESSAGES, "reward": 1.0, "tool_calls": calls}
        (reason,) = step(gateway, f"tools {stream}", [member])["dropped"]
        assert reason in ("tool_choice", "logit_bias")
    nobodys = {"messages": MESSAGES, "reward": 1.0, "tool_calls": [called(name="nobody")]}
    reason = "text not trainable: it calls tools, and no answer served here does so"
    assert step(gateway, "nobody", [nobodys])["dropped"] == {reason: 1}


def calls_of_one(text: str) -> list[dict[str, Any]]:
    """The calls of a choice that ended by itself, of a whole answer or a stream, written otherwise."""
    if not text.startswith("data:"):
        choices = json.loads(text)["choices"]
        (calls, *_) = [one["message"]["tool_calls"] for one in choices if one["finish_reason"] != "length"]
        return [called(**call["function"]) for call in calls]
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for part in parts for choice in part["choices"]]
    ended = next(one["index"] for one in choices if one["finish_reason"] not in (None, "length"))
    deltas = [one["delta"].get("tool_calls") or [] for one in choices if one["index"] == ended]
    functions = [call["function"] for calls in deltas for call in calls]
    arguments = json.loads("".join(one.get("arguments") or "" for one in functions))
    name = next(one["name"] for one in functions if one.get("name"))
    return [called(name=name, arguments=json.dumps(arguments, indent=2))]
