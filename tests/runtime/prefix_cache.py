"""What an engine's prefix cache was asked for and had, by vLLM's own counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.gateway.engines.engine_client import EngineClient

TOKENS = 8


@dataclass(frozen=True)
class Answered:
    """The tokens that were looked for and found in the cache for one request, and its answer's logprobs."""

    looked_for: int
    found: int
    logprobs: list[float]


async def answered(client: EngineClient, model: str, prompt: list[int]) -> Answered:
    """The greedy answer of `TOKENS` tokens. The counters are the whole engine's: `looked_for` shows others'.

    A step's counters are written after its tokens are sent, the first step's well before the last token is.
    """
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "logprobs": 0}
    before = await client.cache_use()
    answer = await client._json("POST", "/v1/completions", body | {"temperature": 0, "ignore_eos": True})
    after = await client.cache_use()
    looked_for, found = (late - early for late, early in zip(after, before, strict=True))
    return Answered(looked_for, found, answer["choices"][0]["logprobs"]["token_logprobs"])
