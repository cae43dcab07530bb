"""The limit on an answer's length when the request names none.

One agent that rambles into 32k tokens holds up a whole step, and is then cut off and left out all the same.
Neighbours: the gateway applies it where it checks a request's fields. vLLM gives completions 16 tokens, as
OpenAI does, and no chat more than its context leaves.
"""

from __future__ import annotations

from typing import Any, Literal

_NAMES = ("max_tokens", "max_completion_tokens")


def limit_answer(kind: Literal["chat", "completion"], body: dict[str, Any], tokens: int) -> None:
    """Write the limit into a chat request's body, in place: whether an answer was cut off is judged by it."""
    if kind == "completion" or any(body.get(name) is not None for name in _NAMES):
        return
    least = body.get("min_tokens")
    body["max_tokens"] = max(tokens, least) if type(least) is int else tokens
