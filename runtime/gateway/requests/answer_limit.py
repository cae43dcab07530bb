"""The limit on an answer's length: the run's own where the request names none, and never past the context.

One agent that rambles into 32k tokens holds up a whole step, and is then cut off and left out all the same.
Neighbours: the gateway applies it where it checks a request's fields, which is after the request was told
from others: what is written here may change from one life of the gateway to the next. vLLM gives completions
16 tokens, as OpenAI does, and no chat more than its context leaves.
"""

from __future__ import annotations

from typing import Any

from runtime.gateway.http.openai_errors import CONTEXT_LENGTH, ApiError
from runtime.gateway.requests.request_fields import Kind

_NAMES = ("max_tokens", "max_completion_tokens")


def limit_answer(kind: Kind, body: dict[str, Any], tokens: int, context: int | None) -> None:
    """Write the limit into a request's body, in place: whether an answer was cut off is judged by it.

    `tokens`: the run's limit; `context`: the longest sequence in tokens, if it is known. Raises ApiError(400)
    for ids past the context.
    """
    # vLLM refuses a limit past its context, however short the prompt is.
    most = context
    if kind != "chat" and context is not None:
        longest = _longest_ids(body["prompt"])
        if longest >= context and body.get("truncate_prompt_tokens") is None:
            param = "token_ids" if kind == "tokens" else "prompt"
            raise ApiError(400, _too_long(longest, context), param=param, code=CONTEXT_LENGTH)
        most = max(context - longest, 1)
    given = next((body[name] for name in _NAMES if body.get(name) is not None), None)
    if kind == "tokens" and type(given) is int and most is not None:
        body["max_tokens"] = min(given, most)
    if kind == "completion" or given is not None:
        return
    least = body.get("min_tokens")
    limit = max(tokens, least) if type(least) is int else tokens
    body["max_tokens"] = limit if most is None else min(limit, most)


def _longest_ids(prompt: Any) -> int:
    """The most ids that a prompt has; of texts the engine counts them."""
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], list):
        return max(len(one) for one in prompt if isinstance(one, list))
    return 0 if isinstance(prompt[0], str) else len(prompt)


def _too_long(length: int, context: int) -> str:
    return (
        f"This model's maximum context length is {context} tokens. Your prompt has {length}, "
        "which leaves no room for an answer."
    )
