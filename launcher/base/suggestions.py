"""Suggests the known word closest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that is closest to `word`, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None
