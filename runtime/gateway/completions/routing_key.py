"""The routing key of a request: its rollout, and digests of the questions it may continue.

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
from runtime.gateway.samples.conversations import is_answer

_DIGEST_BYTES = 16


def routing_key_of(asked: ParsedRequest) -> RoutingKey:
    """Digests are made only when needed: a long conversation takes a while to read."""
    return RoutingKey(asked.tags.rollout, lambda: _questions(asked))


def _questions(asked: ParsedRequest) -> tuple[bytes, ...]:
    """The whole question, and the one before its last answer, as that was asked."""
    if asked.kind == "completion":
        return (_digest(asked.body["prompt"]),)
    messages, tools = asked.body["messages"], asked.body.get("tools")
    whole = _digest([tools, messages])
    answers = [place for place, message in enumerate(messages) if is_answer(message)]
    return (whole, _digest([tools, messages[: answers[-1]]])) if answers else (whole,)


def _digest(question: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(question), digest_size=_DIGEST_BYTES).digest()
