"""Names for the prefixes of a conversation, by which a request finds the answers that it continues.

A conversation that is sent again with its answers unchanged has, up to each answer, the name that the answer
was recorded under. Some parts are not compared, because clients make them anew or leave them out: ids of
calls, thoughts, empty fields, the spelling of a call's arguments. Any other change gives another name.
Neighbours: content_key.py has the one form of a message; turn_index.py keeps the names;
completions/prefix_continuation.py asks. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.gateway.samples import content_key
from runtime.gateway.samples.content_key import Call
from runtime.gateway.samples.journal import Tags

_NAME_BYTES = 16
_ASSISTANT = "assistant"
# The roles that instruct the whole conversation.
_SYSTEM = ("system", "developer")
# Fields of any message that clients make themselves.
_CLIENT_IDS = frozenset({"tool_call_id", "id"})
# Fields of an answer that hold nothing of its text, or repeat the sampled text.
_IGNORED_FIELDS = frozenset(
    {
        "reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "provider_specific_fields",
        "refusal", "annotations", "audio", "name", "function_call",
    }
)  # fmt: skip


class NotConversationError(ValueError):
    """These are no messages of a conversation; the engine will report it."""


@dataclass(frozen=True)
class PrefixNames:
    """The names of a conversation up to a message: with its system prompt, and without."""

    name: str
    bare: str


def prefix_names(tags: Tags, messages: Sequence[Any]) -> list[PrefixNames]:
    """The names of each prefix of a conversation: before its first message, after it, after the second, …

    Those of a rollout's are its own, by predictor and purpose. Raises NotConversationError.
    """
    scope = _named("", [tags.rollout, tags.predictor, tags.purpose])
    found = [PrefixNames(scope, scope)]
    for message in messages:
        found.append(_after(found[-1], _form(message)))
    return found


def name_with_answer(question: PrefixNames, text: str, calls: Iterable[Call]) -> str:
    """The name of a question with this answer to it."""
    message = {"role": _ASSISTANT, "content": text, "tool_calls": content_key.normalised_calls(calls)}
    return _named(question.name, _without_empty_fields(message))


def is_answer(message: Any) -> bool:
    """Whether a message is an assistant's."""
    return isinstance(message, Mapping) and message.get("role") == _ASSISTANT


def digest_of(value: Any) -> str:
    """One name for a plain value, as it was written."""
    return _named("", value)


def _form(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NotConversationError("a message is not an object")
    try:
        plain = content_key.plain(message)
    except RecursionError as error:
        raise NotConversationError("a message is nested too deeply") from error
    beside = _CLIENT_IDS | _IGNORED_FIELDS if is_answer(message) else _CLIENT_IDS
    return _without_empty_fields({name: value for name, value in plain.items() if name not in beside})


def _without_empty_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value not in (None, "", [], {})}


def _after(before: PrefixNames, message: Mapping[str, Any]) -> PrefixNames:
    name = _named(before.name, message)
    return PrefixNames(name, before.bare if message.get("role") in _SYSTEM else _named(before.bare, message))


def _named(before: str, message: Any) -> str:
    try:
        written = json.dumps([before, message], sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotConversationError("it cannot be written down") from error
    return hashlib.blake2b(written.encode(), digest_size=_NAME_BYTES).hexdigest()
