"""The protocol of a judge, and the reading of a chat completion's body.

Neighbours: `http_judge.py`, `run_judge.py` and `sdk_judges.py` are judges, `judges.py` finds the right one.
Knows nothing of the judged texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from launcher.client.request_bodies import PURPOSE_HEADER
from launcher.client.ruler.judge_failures import AnswerUnusable, Declined, JudgeUnusable, RetryableError
from launcher.client.ruler.judge_usage import Usage
from launcher.client.trajectories.members import get_field

Messages = Sequence[Mapping[str, Any]]

# Asked again: it may be there later. 408, 409 and 425 are a server's own "not now".
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_UNUSABLE = {
    401: "it does not know this key",
    402: "its account has no credit left",
    403: "it refuses this key",
    404: "there is no such model",
}
# OpenAI answers 429 for an account without credit, OpenRouter 403 for a text that its moderation does not
# pass.
_NO_CREDIT, _FLAGGED = "insufficient_quota", ("moderation", "flagged")
_MAX_ERROR_CHARACTERS = 200
# Of an answer that holds scores and a line for each.
_MAX_ANSWER_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class JudgeReply:
    """One answer, and its usage."""

    text: str
    usage: Usage


class Judge(Protocol):
    """Raises RetryableError, Declined, AnswerUnusable or JudgeUnusable."""

    @property
    def name(self) -> str:
        """The judge's name for people."""
        ...

    @property
    def identity(self) -> str | None:
        """The key under which its answers may be cached; None for a name that may mean other weights
        tomorrow."""
        ...

    async def ask(self, messages: Messages, form: Mapping[str, Any], seconds: float) -> JudgeReply:
        """Answer in this form, as OpenAI's `response_format` has it."""
        ...


def error_for_status(name: str, status: int, text: str, seconds: float | None = None) -> Exception:
    """The error that an HTTP status means for the question."""
    if status == 429 and _NO_CREDIT in text:
        status = 402
    is_about_the_text = status == 403 and any(word in text.lower() for word in _FLAGGED)
    text = text[:_MAX_ERROR_CHARACTERS]
    if status in _RETRYABLE_STATUSES:
        return RetryableError(f"HTTP {status}: {text}", seconds)
    if status in _UNUSABLE and not is_about_the_text:
        return JudgeUnusable(
            f"The judge {name} cannot be asked: {_UNUSABLE[status]}",
            f"HTTP {status}: {text}",
            "look at the judge's name, address, key and account",
        )
    return Declined(f"HTTP {status}: {text}")


def parse_completion(body: Any, cost: float | None) -> JudgeReply:
    """The reply of a chat completion, from its JSON or an SDK's object."""
    usage = get_field(body, "usage")
    used = Usage(1, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), cost)
    choices = get_field(body, "choices")
    message = get_field(choices[0], "message") if isinstance(choices, list) and choices else None
    text = get_field(message, "content")
    if not isinstance(text, str) or not text.strip():
        raise AnswerUnusable("it refused" if get_field(message, "refusal") else "it is empty", used)
    if len(text) > _MAX_ANSWER_CHARACTERS:
        raise AnswerUnusable("it is too long", used)
    return JudgeReply(text, used)


def _count(usage: Any, name: str) -> int:
    count = get_field(usage, name)
    return count if isinstance(count, int) else 0


def is_own_run(base_url: str | None) -> bool:
    """Whether a judge's address is that of the run this program is in."""
    here = os.environ.get("LAUNCH_BASE_URL")
    return bool(here and base_url) and _host_and_port(here) == _host_and_port(base_url)


def _host_and_port(url: str | None) -> tuple[str | None, int | None]:
    parts = urlsplit(url or "")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, parts.port


def headers_for(base_url: str | None) -> dict[str, str]:
    """The headers a judge's request has: on a run's endpoint it is never training material (X17).

    No other server gets our headers.
    """
    return {PURPOSE_HEADER: "eval"} if is_own_run(base_url) else {}


def cache_identity(place: str, model: str, extra_params: Mapping[str, Any]) -> str:
    """A judge whose answers may be kept: its address, name and sampling; no key."""
    settings = {name: value for name, value in extra_params.items() if name != "api_key"}
    return json.dumps([place, model, settings], sort_keys=True, default=repr)


def names_fixed_weights(model: str) -> bool:
    """Whether a run's name means the same weights tomorrow."""
    return model == "base" or "+" in model
