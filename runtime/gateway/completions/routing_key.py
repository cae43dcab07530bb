"""The routing key of a request: its rollout, and digests of the prompts it may continue.

Neighbours: proxy.py asks once per attempt; engines/router.py sends a request to the engine with a cached
prefix. prefix_continuation.py finds the very answer that a turn goes on from, in ids; this only names the
engine to try first.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.engines.router import RoutingKey
from runtime.gateway.samples.conversation_names import is_answer

_DIGEST_BYTES = 16


def routing_key_of(request: ParsedRequest) -> RoutingKey:
    """Digests are made only when needed: a long conversation takes a while to read."""
    return RoutingKey(request.tags.rollout, lambda: _prompt_prefixes(request))


def _prompt_prefixes(request: ParsedRequest) -> tuple[bytes, ...]:
    """The digests of the whole prompt and of its part before the last answer, which is an earlier turn's
    prompt."""
    if request.kind != "chat":
        return (_digest(request.body["prompt"]),)
    messages, tools = request.body["messages"], request.body.get("tools")
    whole = _digest([tools, messages])
    answers = [place for place, message in enumerate(messages) if is_answer(message)]
    return (whole, _digest([tools, messages[: answers[-1]]])) if answers else (whole,)


def _digest(prompt: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(prompt), digest_size=_DIGEST_BYTES).digest()
