"""The lives of a resumed run: the length and cost of each, without the time between them.

Neighbours: `records.py` keeps them, `launch status` and the end of a run show them. Times are `time.time()`:
it goes on while the computer sleeps and is the same for every process that reads a record. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Life:
    """From its launch to its proven end, None while it lives; in US dollars per hour."""

    begun: float
    ended: float | None = None
    price_per_hour: float = 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read a record's entry. Fields of a later version are ignored."""
        return cls(**{key: values[key] for key in cls.__dataclass_fields__ if key in values})

    def seconds(self, now: float) -> float:
        """How long it was, or has been by `now`."""
        return max(0.0, (now if self.ended is None else self.ended) - self.begun)

    def cost(self, now: float) -> float:
        """US dollars."""
        return self.price_per_hour * self.seconds(now) / 3600


def seconds(lives: Iterable[Life], now: float) -> float:
    """Their total duration."""
    return sum(life.seconds(now) for life in lives)


def cost(lives: Iterable[Life], now: float) -> float:
    """Their total cost in US dollars."""
    return sum(life.cost(now) for life in lives)
