"""Warnings for a run's owner: each is shown once, in the log and in the status.

Neighbours: completions and steps add them, status_reader.py shows them. Kept while this process lives.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Warnings:
    """The first warning of each kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        """The warnings, in order."""
        return [*self._by_kind.values()]

    def warn_once(self, kind: str, line: str) -> None:
        """Add it, unless there is one of this kind."""
        if kind not in self._by_kind:
            self._by_kind[kind] = line
            log.warning("%s", line)
