"""The text of a recorded exchange: the question, and each choice of the answer.

Neighbours: journal.py has the exchange, answers.py wrote its answer; field_index.py asks. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.gateway.samples.journal import ExchangeText


def choice_texts(said: ExchangeText) -> dict[int, str]:
    """The choices of an answer that are text and nothing else, each by its place."""
    parts: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for body in _bodies(said):
        for given in body.get("choices") or ():
            parts[given["index"]].append(given.get("message", given.get("delta")) or {})
    return {
        place: "".join(part.get("content") or "" for part in message)
        for place, message in parts.items()
        if not any(part.get("tool_calls") for part in message)
    }


def _bodies(said: ExchangeText) -> Iterator[dict[str, Any]]:
    """The answer, or its parts event by event."""
    if not said.streamed:
        yield msgspec.json.decode(said.answer)
        return
    for event in msgspec.json.decode(said.answer, type=str).split("\n\n"):
        if event.startswith("data: {"):
            yield msgspec.json.decode(event[6:].encode())
