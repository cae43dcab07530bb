"""What a run's owner should know and nobody asked for: each said once, in the log and in the status.

Neighbours: completions and steps say, readiness.py shows. Kept while this process lives.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Warnings:
    """One line of each kind: the first that was said."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        """What was said, in its order."""
        return [*self._said.values()]

    def say(self, kind: str, line: str) -> None:
        """Say it, unless something of this kind was said before."""
        if kind not in self._said:
            self._said[kind] = line
            log.warning("%s", line)
