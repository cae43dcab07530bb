"""The score of an answer.

Neighbours: `slipway_program.py` and the program it is compared with (`tests/bench/trl/`) reward with it.
Standard library only: another trainer's environment has neither `launcher` nor its packages.
"""

from __future__ import annotations

import unicodedata


def letters(text: str) -> int:
    """The number of different letters of a to z in a text, accents ignored."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return len(set(plain) & set("abcdefghijklmnopqrstuvwxyz"))
