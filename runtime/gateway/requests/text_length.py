"""The most characters that a context can hold: no engine is asked to tokenise a longer text.

vLLM bounds a request's prompt. A text that it only tokenises has no bound, and vLLM answers nothing else
meanwhile.
Neighbours: fine_tuning/conversations.py checks a file, steps/rendering.py a text to be tokenised. Pure.
"""

from __future__ import annotations

from typing import Any

# English has 4 or 5, a program with much indentation 8; a longer average is filling.
CHARACTERS_PER_TOKEN = 16


def max_characters(context_tokens: int) -> int:
    """More than this is longer than a context of so many tokens."""
    return CHARACTERS_PER_TOKEN * context_tokens


def characters(value: Any) -> int:
    """The characters of every text in a JSON value, names included."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    return count
