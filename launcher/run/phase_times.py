"""The usual duration of each phase on this computer: the median of its last few times.

Neighbours: `run.py` reads and adds times. They are not essential: an unreadable file counts as an empty one.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path

from launcher.base import atomic

_MAX_TIMES = 5


class PhaseTimes:
    """Seconds by (kind of machine, phase), in one small file of the cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds = self._read()

    def usual(self, kind: str, phase: str) -> float | None:
        """The median of the last times; None for the first time."""
        known = self._seconds.get(f"{kind}/{phase}")
        return statistics.median(known) if known else None

    def add(self, kind: str, phase: str, seconds: float) -> None:
        """Remember one time. Two runs at once may lose one of theirs."""
        self._seconds = self._read()
        key = f"{kind}/{phase}"
        self._seconds[key] = [*self._seconds.get(key, []), round(seconds, 2)][-_MAX_TIMES:]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(self._path, json.dumps(self._seconds))

    def _read(self) -> dict[str, list[float]]:
        try:
            data = json.loads(self._path.read_text())
            return {key: [float(value) for value in values] for key, values in data.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}
