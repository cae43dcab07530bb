"""Answers in the engine's own form, and what the gateway records of them, for tests without an engine."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from runtime.gateway.completions import request_parsing
from runtime.gateway.completions.answers import Choice, WholeAnswer, question, samples
from runtime.gateway.completions.prefix_continuation import ChatTurn
from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.engines.engine_client import UNKNOWN, EngineFacts
from runtime.gateway.requests import distribution
from runtime.gateway.samples.journal import Exchange
from runtime.gateway.samples.samples import SampleStore

MESSAGES = [{"role": "user", "content": "hello"}]


def asked(request: str | None = None, rollout: str | None = None, **fields: Any) -> ParsedRequest:
    """An admitted chat request; `fields` are its sampling settings, or headers where they begin with x_."""
    headers = {name.replace("_", "-"): value for name, value in fields.items() if name.startswith("x_")}
    if request is not None:
        headers["x-slipway-request"] = request
    body = {"model": "policy", "messages": MESSAGES} | {
        name: value for name, value in fields.items() if not name.startswith("x_")
    }
    return request_parsing.parse_request("chat", headers, rollout, json.dumps(body).encode())


def choice(ids: list[int], logprobs: list[float | None], text: str = "x", index: int = 0) -> dict[str, Any]:
    """One choice as vLLM words it."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": [{"token": "?", "logprob": value, "bytes": []} for value in logprobs]},
        "finish_reason": "stop",
        "token_ids": ids,
    }


def answer(prompt: list[int], *choices: dict[str, Any]) -> bytes:
    """A whole chat answer as vLLM sends it."""
    body = {"id": "chatcmpl-1", "model": "base", "choices": list(choices), "prompt_token_ids": prompt}
    return json.dumps(body).encode()


def record(
    store: SampleStore,
    request: ParsedRequest,
    content: bytes,
    version: int = 0,
    delivered: bool = True,
    engine: EngineFacts = UNKNOWN,
    turn: ChatTurn | None = None,
) -> list[str]:
    """Record an answer as proxy.py does; the samples' ids."""
    whole = WholeAnswer(request, f"policy@v{version}", content)
    body = msgspec.Raw(whole.body)
    return record_choices(store, request, whole.choices, body, version, delivered, engine, turn)


def record_choices(
    store: SampleStore,
    request: ParsedRequest,
    choices: dict[int, Choice],
    body: msgspec.Raw,
    version: int,
    delivered: bool,
    engine: EngineFacts = UNKNOWN,
    turn: ChatTurn | None = None,
) -> list[str]:
    prompts, found = samples(request, choices, engine, turn, repeats_grammars=lambda: True)
    exchange = Exchange(
        request=request.id,
        digest=request.digest,
        created=time.time(),
        tags=request.tags,
        model=f"policy@v{version}",
        version=version,
        temperature=distribution.temperature(request.body),
        settings=request.settings,
        prompts=prompts,
        samples=found,
        streamed=request.streamed,
        answer=body,
        delivered=delivered,
        messages=question(request),
        conversation=turn and turn.conversation,
    )
    store.record(exchange)
    return [sample.id for sample in found]


def sampled(store: SampleStore, rollout: str, version: int = 0, **fields: Any) -> list[str]:
    """One ordinary sample of a rollout: three tokens after a prompt of two."""
    content = answer([1, 2], choice([3, 4, 5], [-0.5, -1.0, -0.25]))
    return record(store, asked(rollout=rollout, **fields), content, version)
