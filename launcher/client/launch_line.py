"""The line of `launch` that started this program's run, with other options: a hint to paste.

`launch` gives the line to the program that it starts, not to others of the same run. Neighbours:
`train_kwargs.py`, `staleness.py` and `arbor/server.py` refuse what the run cannot do. Knows no option.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

# Written by `launch` (`records/endpoint.py`): its options, `--`, and the program.
VARIABLE = "LAUNCH_LINE"


def program_line() -> str:
    """This program as it was typed."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def line_with(options: str) -> str | None:
    """The line with these options, in the place of the same ones; None if it is not known."""
    words = shlex.split(os.environ.get(VARIABLE, ""))
    if "--" not in words:
        return None
    at = words.index("--")
    changed = shlex.split(options)
    keys = {_key(changed, it) for it, word in enumerate(changed) if word.startswith("--")}
    kept = _without(words[:at], keys)
    return shlex.join([*kept, *changed, *words[at:]])


def hint_of_fitting_run(options: str) -> str:
    """A hint for a run with these options: its whole line, or how that begins."""
    line = line_with(options)
    return f"a run that fits starts with `launch {options} -- python PROGRAM`" if line is None else line


def _without(words: Sequence[str], keys: set[str]) -> Iterator[str]:
    """The words but for options of these keys and their values."""
    left = iter(range(len(words)))
    for index in left:
        if _key(words, index) not in keys:
            yield words[index]
        elif _has_value(words, index):
            next(left)


def _key(words: Sequence[str], index: int) -> str:
    """`--model` of that option, `train.seed` of `--set train.seed=1`; the word itself if it is no option."""
    flag, _, value = words[index].partition("=")
    if flag != "--set":
        return flag
    return (words[index + 1] if _has_value(words, index) else value).partition("=")[0]


def _has_value(words: Sequence[str], index: int) -> bool:
    """Whether the next word is this option's value."""
    return "=" not in words[index] and index + 1 < len(words) and not words[index + 1].startswith("-")
