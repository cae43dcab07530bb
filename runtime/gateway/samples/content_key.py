"""Keys for an exchange by its content, for clients that cannot tag their requests.

Neighbours: answers.py keys the served answers, matching.py those that a group's member names. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_KEY_BYTES = 16
_AROUND_BYTES = 6


class Call(NamedTuple):
    """A tool's call in an answer. `arguments`: as the client sent them; some clients parse them."""

    name: str
    arguments: Any


def key(messages: Iterable[Any], answer: str, calls: Sequence[Call] = ()) -> str:
    """The key of a question and the text of its answer, with its tool calls.

    White space around the answer does not count, because clients that parse an answer and write it again
    strip it. The format of a call's arguments does not count either.
    """
    content = [[plain(message) for message in messages], answer.strip()]
    if calls:
        content.append(normalised_calls(calls))
    # Escaped: half a surrogate pair, which a body may hold, is no text that can be encoded.
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_KEY_BYTES).hexdigest()


def surrounding_whitespace(answer: str) -> str:
    """The white space around an answer, as a short form; "" for none. It does not count in the key, but
    tells two equal answers apart for clients that keep it."""
    stripped = answer.strip()
    if stripped == answer:
        return ""
    before, after = answer.split(stripped, 1) if stripped else (answer, "")
    return hashlib.blake2b(json.dumps([before, after]).encode(), digest_size=_AROUND_BYTES).hexdigest()


def calls_of(tool_calls: Iterable[Any] | None) -> list[Call]:
    """The calls in an assistant's message of OpenAI's; their ids do not count, a client may make its own."""
    functions = [_function(call) for call in tool_calls or ()]
    return [Call(str(function.get("name")), function.get("arguments") or "") for function in functions]


def normalised_calls(calls: Iterable[Call]) -> list[Any]:
    """Calls in one form, however their arguments are written."""
    return [[call.name, _parsed(call.arguments)] for call in calls]


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _parsed(arguments: Any) -> list[str]:
    """The content of a call's arguments, in any spelling: parsed if they are JSON."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return ["json", json.dumps(parsed, sort_keys=True)]
    except (ValueError, RecursionError):
        return ["text", str(arguments).strip()]


def plain(message: Any) -> Any:
    """A message without absent fields, its parts as one text, its calls in the answer's form."""
    if not isinstance(message, Mapping):
        return message
    kept = {name: value for name, value in message.items() if value is not None}
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = normalised_calls(calls_of(calls)) if isinstance(calls, list) else calls
    content = kept.get("content")
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        if None not in texts:
            kept["content"] = "".join(map(str, texts))
    return kept


def _text(part: Any) -> Any:
    """The text of a part: of an answer or a refusal; None if it has none."""
    return part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
