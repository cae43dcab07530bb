"""What a small run makes of members that are given as text: as the gateway, by the fields that were said.

DSPy samples with one adapter and writes what it trains with another; both name their fields. Each answer is
meant once, the newest first, and no evaluation ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.shared.schema import Group

_CHAT = re.compile(r"\[\[ ## (\w+) ## \]\]\n(.*?)(?=\n\n|\Z)", re.DOTALL)
_XML = re.compile(r"<(\w+)>\n?(.*?)\n?</\1>", re.DOTALL)


class Request(Protocol):
    """A completion that was asked for."""

    @property
    def body(self) -> dict[str, Any]: ...

    def tag(self, name: str) -> str | None: ...


def fields(text: str) -> tuple[tuple[str, str], ...] | str:
    """The fields of a text and what they hold; the text where it has none."""
    found = [(name, value.strip()) for name, value in _CHAT.findall(text) or _XML.findall(text)]
    return tuple(it for it in found if it[0] != "completed") or text.strip()


def _name(messages: Sequence[dict[str, Any]], answer: str) -> tuple[Any, ...]:
    return fields(messages[-1]["content"]), fields(answer)


@dataclass
class Matched:
    """Which answers the members of a step mean."""

    answered: Sequence[tuple[Request, str]]
    taken: set[int]

    def of(self, groups: Sequence[Group]) -> tuple[int, int]:
        """How many members mean an answer, and how many none: those would be tokenised anew."""
        found = unknown = 0
        for member in (it for group in groups for it in group.members if it.messages is not None):
            name = _name(member.messages or [], member.completion or "")
            place = next((it for it in self._newest_first() if self._is(it, name)), None)
            if place is None:
                unknown += 1
            else:
                self.taken.add(place)
                found += 1
        return found, unknown

    def _newest_first(self) -> list[int]:
        return [it for it in reversed(range(len(self.answered))) if it not in self.taken]

    def _is(self, place: int, name: tuple[Any, ...]) -> bool:
        asked, text = self.answered[place]
        if asked.tag("purpose") == "eval" or asked.tag("rollout"):
            return False
        return _name(asked.body["messages"], text) == name
