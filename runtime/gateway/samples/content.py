"""The name of an exchange by what was said in it, for clients that cannot tag their requests.

Neighbours: answers.py names what was answered, from_text.py what a member of a group claims was. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

_KEY_BYTES = 16


def key(messages: Iterable[Any], answer: str) -> str:
    """One name for a question as it was asked and the text of an answer to it.

    White space around the answer does not count: clients that parse an answer and write it again strip it.
    """
    # Escaped: half a surrogate pair, which a body may hold, is no text that can be encoded.
    said = json.dumps([[_plain(message) for message in messages], answer.strip()], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=_KEY_BYTES).hexdigest()


def _plain(message: Any) -> Any:
    """A message without what is not there, its parts as the one text they are."""
    if not isinstance(message, Mapping):
        return message
    kept = {name: value for name, value in message.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        if None not in texts:
            kept["content"] = "".join(map(str, texts))
    return kept


def _text(part: Any) -> Any:
    """The text of a part: what is said, or refused with; None where it has none."""
    return part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
