"""The line of `launch` that started this program's run, with other options: a hint to paste.

`launch` gives the line to the program that it starts, not to others of the same run. Neighbours:
`train_kwargs.py`, `staleness.py` and `arbor/server.py` refuse what the run cannot do. Knows no option.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from launcher.base.secret_words import mask_secrets

# Written by `launch` (`records/endpoint.py`): its options, `--`, and the program.
VARIABLE = "LAUNCH_LINE"


_UNKNOWN_PROGRAM = "python YOUR_PROGRAM.py"
# Options of Python up to one that takes the rest of the word or the next one.
_OPTION = re.compile(r"-[^-cmXW]*([cmXW])(.*)", re.DOTALL)
# They run a program of the user's, or a text: nobody starts them under `launch`.
_RUNNERS = frozenset(
    {"-", "ipykernel_launcher", "ipykernel", "IPython", "ipython", "ipython3", "pdb", "debugpy", "pydevd"}
    | {"pytest", "py.test", "vscode_pytest", "_jb_pytest_runner", "unittest", "_jb_unittest_runner"}
)


def launch_hint(options: str = "", in_notebook: str | None = None) -> str:
    """The line that starts a run with these options and this very program in it.

    `in_notebook`: the line there, where the program does not end.
    """
    if "ipykernel" in sys.modules:
        return in_notebook or 'launch up --name dev  # in a terminal, and then connect("dev")'
    return " ".join(filter(None, ["launch", options, "--", _program_line()]))


def _program_line() -> str:
    """This program as it was typed, without its secrets; a name to replace if it is no program of its own."""
    words = sys.orig_argv[1:]
    main = _main(words)
    if main is None or _RUNNERS & {*main.split("."), *PurePath(main).parts, PurePath(main).stem}:
        return _UNKNOWN_PROGRAM
    return shlex.join(["python", *mask_secrets(words)])


def _main(words: Sequence[str]) -> str | None:
    """The file or module that Python was started with; None for a text or a terminal."""
    left = iter(words)
    for word in left:
        option = _OPTION.fullmatch(word)
        if option is not None:
            value = option[2] or next(left, None)
            if option[1] in "cm":
                return value if option[1] == "m" else None
        elif word == "-" or not word.startswith("-"):
            return word
    return None


def line_with(options: str) -> str | None:
    """The line with these options, in the place of the same ones; None if it is not known, or if the model of
    the run that it starts from would have to be named."""
    words = shlex.split(os.environ.get(VARIABLE, ""))
    if "--" not in words:
        return None
    at = words.index("--")
    changed = shlex.split(options)
    keys = {_key(changed, it) for it, word in enumerate(changed) if word.startswith("--")}
    if "--model" in keys:
        keys.add("--from")  # its adapter is one of another model
    elif any(it.startswith("train.lora.") for it in keys) and "--from" in map(_flag, words[:at]):
        return None
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


def _flag(word: str) -> str:
    return word.partition("=")[0]


def _key(words: Sequence[str], index: int) -> str:
    """`--model` of that option, `train.seed` of `--set train.seed=1`; the word itself if it is no option."""
    flag, _, value = words[index].partition("=")
    if flag != "--set":
        return flag
    return (words[index + 1] if _has_value(words, index) else value).partition("=")[0]


def _has_value(words: Sequence[str], index: int) -> bool:
    """Whether the next word is this option's value."""
    return "=" not in words[index] and index + 1 < len(words) and not words[index + 1].startswith("-")
