"""A bounded table of the engine that has a prefix cached: old and unused entries are removed.

Neighbours: router.py has one of rollouts and one of prompts. Knows nothing of either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from runtime.gateway.engines.engine import Engine

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class _Affinity:
    engine: Engine
    version: int
    since: float


class AffinityTable(Generic[Key]):
    """The newest home of each key; at most `most`, none older than `seconds` by `clock`."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        # The one that was put last is last.
        self._homes: OrderedDict[Key, _Affinity] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, key: Key, version: int) -> Engine | None:
        """The engine that has this cached under this version."""
        home = self._homes.get(key)
        return home.engine if home is not None and home.version == version else None

    def put(self, key: Key, version: int, engine: Engine) -> None:
        """This engine has the prefix cached now."""
        now = self._clock()
        self._homes[key] = _Affinity(engine, version, now)
        self._homes.move_to_end(key)
        while self._homes and self._is_over(now):
            self._homes.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Remove the entry."""
        self._homes.pop(key, None)

    def forget_engine(self, engine: Engine) -> None:
        """Remove all entries of an engine."""
        for key in [key for key, home in self._homes.items() if home.engine is engine]:
            del self._homes[key]

    def _is_over(self, now: float) -> bool:
        """Whether the oldest entry is one too many, or too old."""
        oldest = next(iter(self._homes.values()))
        return len(self._homes) > self._most or now - oldest.since > self._seconds
