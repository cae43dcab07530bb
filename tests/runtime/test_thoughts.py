"""What a client is given of an answer with a thought, or taken for one (answers.py, engine/parsers.py)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.command import model_parsers
from runtime.engine.parsers import Parsers
from runtime.gateway.completions.answers import Choice, StreamedAnswer, WholeAnswer
from runtime.gateway.engines.engine_client import EngineClient
from tests.runtime.conftest import TINY_MODEL, EngineProcess
from tests.runtime.recorded import MESSAGES, answer, asked, choice

Message = dict[str, Any]


def whole(finish: str = "stop", **message: Any) -> Message:
    """The message a client gets for the engine's."""
    said = choice([5, 6], [-1.0, -1.0]) | {"finish_reason": finish}
    said["message"] = {"role": "assistant", "content": None} | message
    given = WholeAnswer(asked(), "policy@v1", answer([1], said))
    assert given.choices[0].completion_ids == [5, 6]
    return json.loads(given.body)["choices"][0]["message"]


def streamed(*deltas: Message, finish: str = "stop", copies: int = 1) -> Iterator[list[Message]]:
    """The deltas a client gets of each choice for the engine's; the last comes with the finish."""
    stream = StreamedAnswer(asked(stream=True, temperature=0, n=copies), "policy@v1")
    events = b""
    for place, delta in enumerate(deltas):
        last = place == len(deltas) - 1
        piece = {"index": 0, "delta": delta, "finish_reason": finish if last else None, "token_ids": [5]}
        events += b"data: " + json.dumps({"model": "base", "choices": [piece]}).encode() + b"\n\n"
    choices = [one for event in stream.feed(events) for one in json.loads(event[6:])["choices"]]
    for index in range(copies):
        yield [one["delta"] for one in choices if one["index"] == index]


def test_a_thought_and_its_answer_reach_the_client_apart() -> None:
    assert whole(reasoning="hm", content="yes") == {"role": "assistant", "reasoning": "hm", "content": "yes"}
    deltas = [{"reasoning": "h"}, {"reasoning": "m"}, {"content": "yes"}]
    assert next(streamed(*deltas)) == deltas


@pytest.mark.parametrize("copies", [1, 3])
def test_an_answer_that_was_taken_for_a_thought_as_a_whole_is_content(copies: int) -> None:
    """vLLM does so where no thought ends: Qwen3's base models have its template and never think."""
    assert whole(reasoning="yes")["content"] == "yes"
    for deltas in streamed({"reasoning": "y"}, {"reasoning": "es"}, {}, copies=copies):
        assert deltas == [{"reasoning": "y"}, {"reasoning": "es"}, {"content": "yes"}]


def test_a_thought_that_was_cut_off_or_led_to_a_call_is_no_answer() -> None:
    assert whole("length", reasoning="hm")["content"] == ""
    assert next(streamed({"reasoning": "hm"}, finish="length")) == [{"reasoning": "hm"}]
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert whole("tool_calls", reasoning="hm", tool_calls=call)["content"] is None
    assert whole(reasoning="hm", tool_calls=call)["content"] is None
    assert next(streamed({"reasoning": "hm"}, {"tool_calls": call}, {}))[-1] == {}


@pytest.fixture
def thinker(tmp_path: Path) -> Path:
    """The tiny model with a template and tokens that speak of thoughts; it has none itself."""
    folder = tmp_path / "thinker"
    shutil.copytree(TINY_MODEL, folder)
    (folder / "chat_template.jinja").write_text(
        (TINY_MODEL / "chat_template.jinja").read_text()
        + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    _, second = _rename_the_last(tokenizer, "<think>", "</think>")
    assert second < json.loads((folder / "config.json").read_text())["vocab_size"]
    file.write_text(json.dumps(tokenizer))
    return folder


def _rename_the_last(tokenizer: dict[str, Any], *names: str) -> list[int]:
    """Give the last words of the vocabulary, which no other is made of, new names; their ids."""
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    del merges[-len(names) :]
    last = sorted(vocabulary, key=vocabulary.__getitem__)[-len(names) :]
    ids = [vocabulary.pop(word) for word in last]
    for name, number in zip(names, ids, strict=True):
        vocabulary[name] = number
        common = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": False} | common)
    return ids


@pytest.mark.slow
def test_a_model_that_never_thinks_answers_under_a_template_of_thoughts(
    thinker: Path, own_engine: Callable[..., EngineProcess]
) -> None:
    """Whole and streamed; with every id and logprob that was sampled, in whichever part it is."""
    assert model_parsers(str(thinker)) == Parsers("hermes", "qwen3")
    engine = own_engine(model_path=str(thinker))

    async def ask(client: EngineClient, stream: bool) -> tuple[bytes, Choice, str]:
        request = asked(stream=stream, temperature=0, max_tokens=200)
        body = {"model": "base", "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "stream": stream}
        content = json.dumps(body | {"logprobs": True, "return_token_ids": True}).encode()
        async with client.post("/v1/chat/completions", content) as response:
            raw = await response.read()
        if not stream:
            given = WholeAnswer(request, "policy@v1", raw)
            return raw, given.choices[0], json.loads(given.body)["choices"][0]["message"]["content"]
        reader = StreamedAnswer(request, "policy@v1")
        events = [json.loads(event[6:]) for event in reader.feed(raw) if b"[DONE]" not in event]
        deltas = [one["delta"] for event in events for one in event["choices"]]
        return raw, reader.choices[0], "".join(delta.get("content") or "" for delta in deltas)

    async def scenario() -> None:
        client = EngineClient(engine.socket)
        raw, choice, text = await ask(client, stream=False)
        message = json.loads(raw)["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (None, text), "vLLM takes it for a thought"
        assert text and choice.finish_reason == "stop"
        _, pieces, streamed_text = await ask(client, stream=True)
        assert streamed_text == text
        assert pieces.completion_ids == choice.completion_ids
        assert len(pieces.logprobs) == len(choice.logprobs) == len(choice.completion_ids)
        await client.close()

    engine.wait_until_ready()
    asyncio.run(asyncio.wait_for(scenario(), 120))
