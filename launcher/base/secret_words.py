"""Masks secrets among the words of a command line that is shown or kept: `--api-key x`, `HF_TOKEN=x`.

They are found by the names of the options and variables, so also those that `log.py` was never told.
Neighbours: `cli/typed_line.py` and the client's `launch_line.py` show a program's words. Imports nothing of
ours, because the client imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MASK = "***"
_NAME = re.compile(r"[\w.-]+")
_SECRET = re.compile(r"(?i)key|secret|passw|credential")
# Not a tokenizer; `max_tokens=512` is a number of tokens.
_TOKEN = re.compile(r"(?i)token(?!i[sz])")


def mask_secrets(words: Sequence[str]) -> list[str]:
    """The words with `***` for the value in, or after, a word that names a secret."""
    return list(_masked(words))


def _masked(words: Sequence[str]) -> Iterator[str]:
    option = None  # the one before, if its value is the next word
    for word in words:
        name, equals, value = word.partition("=")
        if option is not None and not word.startswith("-") and _is_secret(option, word):
            yield MASK
        elif equals and _is_secret(name, value):
            yield f"{name}={MASK}"
        else:
            yield word
        option = word if word.startswith("-") and not equals else None


def _is_secret(name: str, value: str) -> bool:
    if not value or not _NAME.fullmatch(name):
        return False
    return bool(_SECRET.search(name) or (_TOKEN.search(name) and not value.isdecimal()))
