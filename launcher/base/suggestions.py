"""What a word that is not known most likely meant.

Knows nothing of what the words are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that `word` most likely meant, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None
