"""What is recorded of a real engine's answers, case by case, and what of it may be trained on.

The measure is the engine itself: scored again, as a plain text without any setting, a sample that may be
trained on has the logprobs that were recorded.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime.gateway.completions import request_parsing
from runtime.gateway.completions.answers import Choice, StreamedAnswer, WholeAnswer, samples
from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.requests.request_fields import CHAT, COMPLETION, Kind, check
from runtime.gateway.samples.journal import Sample
from tests.runtime.conftest import RunningEngine
from tests.runtime.test_engine_fields import TOOL, cases

pytestmark = pytest.mark.slow

EOS = 2
MESSAGES = [{"role": "user", "content": "[[ ## english ## ]]\nthe black cat and the red house"}]
CUT = {
    "greedy", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "response_format", "structured_outputs",
    "tool_choice", "tools",
}  # fmt: skip

Answered = tuple[ParsedRequest, list[list[int]], list[Sample], dict[int, Choice]]


def admitted(kind: Kind, body: dict[str, Any]) -> ParsedRequest:
    question = {"messages": MESSAGES} if kind == "chat" else {"prompt": "the black cat"}
    full = {"model": "policy", "max_tokens": 12, "temperature": 1.0} | question | body
    return request_parsing.parse_request(kind, {}, "rollout", json.dumps(full).encode())


async def answered(client: EngineClient, asked: ParsedRequest) -> Answered:
    """One request as proxy.py sends and reads it."""
    content = json.dumps(asked.for_engine("base", lambda kind, body: check(kind, body, "cpu"))).encode()
    async with client.post(request_parsing.ENGINE_PATHS[asked.kind], content) as response:
        raw = await response.read()
        assert response.status == 200, (asked.body, raw)
    if asked.streamed:
        stream = StreamedAnswer(asked, "policy@v0")
        list(stream.feed(raw))
        assert stream.done and stream.error is None
        choices = stream.choices
    else:
        choices = WholeAnswer(asked, "policy@v0", raw).choices
    prompts, found = samples(asked, choices, client.facts)
    return asked, prompts, found, choices


def with_engine(engine: RunningEngine, scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def body() -> None:
        client = EngineClient(engine.socket)
        try:
            assert await client.health()
            await asyncio.wait_for(scenario(client), 120)
        finally:
            await client.close()

    asyncio.run(body())


async def furthest(client: EngineClient, prompts: list[list[int]], sample: Sample) -> float:
    """The largest difference between what was recorded and what the engine says of the same ids alone."""
    prompt = prompts[sample.prompt]
    scored = await client.score("base", prompt + sample.completion_ids)
    pairs = zip(scored[len(prompt) :], sample.logprobs, strict=True)
    return max(abs(again - said) for again, said in pairs if said is not None)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_c09_what_may_be_trained_on_has_the_engines_own_logprobs_under_every_setting(
    engine: RunningEngine, kind: Kind
) -> None:
    async def scenario(client: EngineClient) -> None:
        bodies = list(cases(CHAT if kind == "chat" else COMPLETION))
        if kind == "chat":
            bodies += [{"tools": [TOOL], "parallel_tool_calls": False}, {"include_reasoning": False}]
        found = await asyncio.gather(*(answered(client, admitted(kind, body)) for body in bodies))
        reasons = set()
        for body, (asked, prompts, collected, _) in zip(bodies, found, strict=True):
            for sample in collected:
                reasons.add(sample.unscorable)
                if sample.unscorable is None and asked.body["temperature"] == 1.0:
                    assert await furthest(client, prompts, sample) < 1e-3, body
        assert reasons - {None} <= CUT and {"top_p", "logit_bias", "min_tokens", None} <= reasons
        assert kind == "completion" or "tool_choice" in reasons

    with_engine(engine, scenario)


def test_what_ends_an_answer_is_recorded_as_it_was_sampled(engine: RunningEngine) -> None:
    """Stop strings and tokens, the end of text, a length: every sampled id is there, whatever the text is."""

    async def scenario(client: EngineClient) -> None:
        (_, _, (plain,), _) = await answered(client, admitted("chat", {"max_tokens": 200}))
        ids = plain.completion_ids
        assert (plain.finish_reason, ids[-1]) == ("stop", EOS)  # the end of text is a sampled token like any
        for streamed in (False, True):
            body = {"stream": streamed, "max_tokens": 64, "n": 8}
            for ending in (
                {"stop": ["a", "e"]},
                {"stop": ["a", "e"], "include_stop_str_in_output": True},
                {"stop_token_ids": list(range(5, 400))},
                {"max_tokens": 3},
                {"ignore_eos": True, "max_tokens": 40},
                {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
            ):
                _, prompts, found, choices = await answered(client, admitted("chat", body | ending))
                assert len(found) == 8 and len(prompts) == 1
                for sample, choice in zip(found, choices.values(), strict=True):
                    assert sample.unscorable is None
                    assert len(sample.completion_ids) == len(sample.logprobs) > 0
                    assert choice.finish_reason == sample.finish_reason
                    check_ending(sample, ending)
                assert await furthest(client, prompts, found[0]) < 1e-3

    with_engine(engine, scenario)


def check_ending(sample: Sample, ending: dict[str, Any]) -> None:
    ids, reason = sample.completion_ids, sample.finish_reason
    if "max_tokens" in ending:
        assert reason == "length" or ids[-1] == EOS
        assert len(ids) <= ending["max_tokens"]
        if ending.get("ignore_eos"):
            assert (reason, len(ids)) == ("length", 40)
    elif "stop_token_ids" in ending:
        assert reason == "stop" and (ids[-1] in ending["stop_token_ids"] or ids[-1] == EOS)
        assert not set(ids[:-1]) & set(ending["stop_token_ids"])
    elif "repetition_detection" in ending:
        assert reason in ("stop", "repetition", "length")
        assert (reason == "stop") == (ids[-1] == EOS)
    else:
        assert reason == "stop"


def test_a_truncated_prompt_is_recorded_as_the_engine_read_it(engine: RunningEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        for kind in ("chat", "completion"):
            words = " ".join(random.choice(["cat", "dog", "house"]) for _ in range(200))
            question = (
                {"messages": [{"role": "user", "content": words}]} if kind == "chat" else {"prompt": words}
            )
            body = question | {"truncate_prompt_tokens": 100, "truncation_side": "left"}
            _, prompts, (sample,), _ = await answered(client, admitted(kind, body))
            assert len(prompts[0]) == 100
            assert await furthest(client, prompts, sample) < 1e-3

    with_engine(engine, scenario)


def test_the_engine_says_what_its_tokenizer_puts_before_a_text(engine: RunningEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        assert client.facts.first_token is None
        assert client.facts.context_length == await client.context_length()
        bare = await client.tokenize("the black cat")
        assert bare and await client.tokenize("the black cat", add_special_tokens=True) == bare

    with_engine(engine, scenario)
