"""Every request field the table lets pass, tried on a real engine: none of them may kill it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.requests.request_fields import CHAT, COMPLETION, FieldRule, check
from tests.runtime.conftest import RunningEngine

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
# Values that are as hard on the engine as the engine's own checks allow.
VALUES: dict[str, list[Any]] = {
    "temperature": [0, 0.01, 2.0],
    "n": [5],
    "max_tokens": [12],
    "max_completion_tokens": [12],
    "stop": [["a", "e"], "the"],
    "stop_token_ids": [[5, 6]],
    "include_stop_str_in_output": [True],
    "stream_interval": [4],
    "top_p": [0.3, 1e-9],
    "top_k": [1, 5, 2**31],
    "min_p": [0.2, 1.0],
    "presence_penalty": [2.0],
    "frequency_penalty": [-2.0],
    "repetition_penalty": [1.7, 1e30],
    "repetition_detection": [{"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}],
    "logit_bias": [{"5": 100, "6": -100}, {str(token): -100 for token in range(800)}],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["the", "é" * 50]],
    "min_tokens": [4],
    "ignore_eos": [True],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ],
    "structured_outputs": [
        {"regex": "[ab]+"},
        {"choice": ["red", "blue"]},
        {"grammar": 'root ::= "a" | "b"'},
    ],
    "prompt_logprobs": [0, 5],
    "echo": [True],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "add_special_tokens": [True],
    "truncate_prompt_tokens": [300],
    "cache_salt": ["x"],
    "add_generation_prompt": [False],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[{"title": "a", "text": "b"}]],
    "reasoning_effort": ["low"],
    "include_reasoning": [False],
    "return_prompt_text": [True],
    "parallel_tool_calls": [False],
    "tools": [[TOOL]],
}
# Fields that are only themselves together with others.
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "logprobs": [{"logprobs": 5}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 20}],
    "logprob_token_ids": [{"logprobs": 3, "logprob_token_ids": [1, 2, 3]}],
    "stream": [{"stream": True, "n": 2}],
    "stream_options": [{"stream": True, "stream_options": {"include_usage": True}}],
    "truncation_side": [{"truncate_prompt_tokens": 300, "truncation_side": "left"}],
    "continue_final_message": [{"continue_final_message": True, "add_generation_prompt": False}],
    "tool_choice": [{"tools": [TOOL], "tool_choice": choice} for choice in ("none", "auto", "required")],
}
ASKED_WITH = {"model", "prompt", "messages"}


def cases(rules: dict[str, FieldRule]) -> list[dict[str, Any]]:
    """One body for each value of each field of a route that passes."""
    passing = [name for name, rule in rules.items() if rule.action == "pass" and name not in ASKED_WITH]
    bodies = []
    for name in passing:
        bodies += TOGETHER.get(name) or [{name: value} for value in VALUES[name]]
    if rules is CHAT:  # there `logprobs` is a switch, not a number
        bodies = [body | {"logprobs": True} if "logprobs" in body else body for body in bodies]
    return bodies


def long_text(length: int) -> Any:
    """A prompt that shares the prefill budget with its neighbours: chunked prefill is what killed `seed`."""
    return [random.randrange(3, 800) for _ in range(length)]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_no_field_that_passes_hurts_the_engine(engine: RunningEngine, kind: Any) -> None:
    rules, path = (CHAT, "/v1/chat/completions") if kind == "chat" else (COMPLETION, "/v1/completions")

    async def one(client: EngineClient, body: dict[str, Any]) -> tuple[int, str]:
        content = json.dumps(check(kind, body, "cpu")).encode()
        async with client.post(path, content) as response:
            return response.status, (await response.text())[:200]

    async def scenario() -> list[tuple[dict[str, Any], tuple[int, str]]]:
        client = EngineClient(engine.socket)
        bodies = cases(rules)
        asked = []
        for body in bodies:
            words = "".join(random.choice("abcdefgh tuvw") for _ in range(500))
            question = (
                {"messages": [{"role": "user", "content": words}]}
                if kind == "chat"
                else {"prompt": long_text(700)}
            )
            asked.append({"model": "base", "max_tokens": 12, "temperature": 1.0} | question | body)
        answers = await asyncio.gather(*(one(client, body) for body in asked))
        assert await client.health()
        assert (await one(client, asked[0]))[0] == 200
        await client.close()
        return list(zip(bodies, answers, strict=True))

    refused = [(body, answer) for body, answer in asyncio.run(scenario()) if answer[0] != 200]
    assert not refused
