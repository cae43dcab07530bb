"""The text of a recorded answer, by choice: the index of samples by their text is built from it.

Neighbours: journal.py has the exchange, answers.py wrote its answer; field_index.py asks. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.gateway.samples.journal import ExchangeText


def text_by_choice(exchange: ExchangeText) -> dict[int, str]:
    """The choices of the answer that are text and nothing else, each by its number."""
    parts: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for body in _bodies(exchange):
        for given in body.get("choices") or ():
            parts[given["index"]].append(given.get("message", given.get("delta")) or {})
    return {
        choice: "".join(part.get("content") or "" for part in message)
        for choice, message in parts.items()
        if not any(part.get("tool_calls") for part in message)
    }


def _bodies(exchange: ExchangeText) -> Iterator[dict[str, Any]]:
    """The answer, or its parts event by event."""
    if not exchange.streamed:
        yield msgspec.json.decode(exchange.answer)
        return
    for event in msgspec.json.decode(exchange.answer, type=str).split("\n\n"):
        if event.startswith("data: {"):
            yield msgspec.json.decode(event[6:].encode())
