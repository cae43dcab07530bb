"""What an answer is worth.

Neighbours: `ours_program.py` rewards with it, and so does what it is compared with (`tests/bench/trl/`).
Standard library only, and nothing of `launcher`: another trainer's environment has neither.
"""

from __future__ import annotations

import unicodedata


def letters(text: str) -> int:
    """How many different letters of a to z a text has, accents aside."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return len(set(plain) & set("abcdefghijklmnopqrstuvwxyz"))
