"""The command line that was typed, and a hint as that line again, with the hint's changes in it.

A hint such as `launch --set train.seed=1` names what should change. Pasted alone it would start an endpoint
without the user's program, model and machine. So the rest of the line goes into it: its verb, its options and
its program. Neighbours: `main.py` makes one, `output.py` asks it before it prints a hint; `errors.py` has
`without`, the settings that a hint leaves out; `secret_words.py` masks the program's secrets. Knows no error.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer.main

from launcher.base.sanitize import one_line
from launcher.base.secret_words import mask_secrets
from launcher.cli.commands import app
from launcher.cli.usage_errors import VERBS

# Verbs that take the options of a run; None is `launch` alone.
_OF_A_RUN = (None, "up", "plan", "config")
# What a hint for `launch plan` names itself (`offers.plan_command`), without what does not apply any more.
_PRICED = frozenset(
    {"--model", "--from", "--gpus", "--infra", "--train-gpus", "--infer-gpus", "--disk", "--set"}
    | {"--budget", "--max-price", "--max", "--lease", "--idle"}
)
_SET, _HELP = "--set", ("--help", "-h")
# Where a remark begins, which a shell passes over.
_REMARK = "  # "
# `start()` of the client types a line of its own: its program is nobody's to paste.
_HOLDER = "launcher.client.holder"


@dataclass(frozen=True)
class _Option:
    """One option as it was typed. `key` is its setting: `gpus` of `--gpus`, `train.seed` of `--set
    train.seed=1`; `flag` the option itself."""

    flag: str
    key: str
    words: tuple[str, ...]


@dataclass
class _Parts:
    """A line in its parts, up to the first word that is neither an option nor a verb: `strange`."""

    verb: str | None = None
    options: list[_Option] = field(default_factory=list)
    program: tuple[str, ...] | None = None
    strange: str | None = None


@dataclass(frozen=True)
class TypedLine:
    """`own`: the words between `launch` and `--`; `program`: those behind it, None without a `--`."""

    own: tuple[str, ...]
    program: tuple[str, ...] | None = None

    def started_by(self) -> str | None:
        """The whole line, for the hints of its program; None without a program of the user's."""
        if not self.program or _HOLDER in self.program:
            return None
        return shlex.join(["launch", *self.own, "--", *mask_secrets(self.program)])

    def complete(self, hint: str, without: Sequence[str] = ()) -> str:
        """The hint with the rest of this line in it; unchanged if it is no command for the same run, or if
        the program has a control character: that could not be pasted as it is shown.

        `without`: settings (and a verb) of this line that it leaves out.
        """
        command, gap, remark = hint.partition(_REMARK)
        if not command.startswith("launch ") or _HOLDER in (self.program or ()):
            return hint
        try:
            words = shlex.split(command)[1:]
        except ValueError:  # a sentence with an apostrophe
            return hint
        at = words.index("--") if "--" in words else len(words)
        changed = _parse(words[:at], tuple(words[at + 1 :]) or None)
        typed = _parse(self.own, self.program)
        if changed.strange is not None or not _is_same_run(typed, changed):
            return hint
        merged = _merge(typed, changed, without)
        if any(one_line(word) != word for word in merged.program or ()):
            return hint
        return f"launch {_text(merged)}{gap}{remark}"


def _is_same_run(typed: _Parts, changed: _Parts) -> bool:
    if typed.verb not in _OF_A_RUN or changed.verb not in (None, "up", "plan"):
        return False
    keys = {it.key for it in changed.options}
    resumes_another = "resume" in keys and "resume" not in {it.key for it in typed.options}
    return "help" not in keys and not resumes_another


def _merge(typed: _Parts, changed: _Parts, without: Sequence[str]) -> _Parts:
    kept_verb = typed.verb if changed.program is None and typed.verb not in without else None
    verb = changed.verb or kept_verb
    dropped = {*without, *(it.key for it in changed.options)}
    taken = _flags_of(verb) - (_PRICED if changed.verb == "plan" else frozenset())
    options = [it for it in typed.options if it.key not in dropped and it.flag in taken]
    return _Parts(verb, [*options, *changed.options], changed.program or typed.program)


def _text(parts: _Parts) -> str:
    words = [parts.verb] if parts.verb else []
    words += [word for option in parts.options for word in option.words]
    if parts.program:
        words += ["--", *mask_secrets(parts.program)]
    return shlex.join(words)


def _parse(own: Sequence[str], program: tuple[str, ...] | None) -> _Parts:
    parts, left, parameters = _Parts(program=program), iter(own), _parameters()
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in _HELP:
            parts.options.append(_Option(flag, "help", (word,)))
        elif flag in parameters:
            parameter = parameters[flag]
            words = (word,) if parameter.is_flag or equals else (word, *_next(left))
            key = _key(parameter) if flag != _SET else (value or words[-1]).partition("=")[0]
            parts.options.append(_Option(parameter.opts[0], key, words))
        elif parts.verb is None and word in VERBS:
            parts.verb = word
        else:
            parts.strange = word
            break
    return parts


def _next(words: Iterator[str]) -> Iterator[str]:
    """The option's value, if the line has it."""
    yield from itertools.islice(words, 1)


def _key(parameter: Any) -> str:
    return parameter.opts[0].lstrip("-").replace("-", "_")


def _parameters() -> dict[str, Any]:
    """The parser's own options, by each of their spellings."""
    root: Any = typer.main.get_command(app)
    found = [*root.params, *(it for verb in _OF_A_RUN if verb for it in root.commands[verb].params)]
    return {flag: it for it in found for flag in (*it.opts, *it.secondary_opts)}


def _flags_of(verb: str | None) -> frozenset[str]:
    """The first spelling of each option that a verb takes, with those of a run."""
    root: Any = typer.main.get_command(app)
    if verb is None:
        return frozenset(it.opts[0] for it in root.params)
    command = root.commands[verb]
    of_a_run = [it for it in root.params if it.name in command.options_of_a_run]
    return frozenset(it.opts[0] for it in (*of_a_run, *command.params))
