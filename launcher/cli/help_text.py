"""The layout of `launch --help`: plain text as wide as the terminal, options grouped by subject.

Neighbours: `commands.py` names the groups. Without it typer would draw boxes through rich, which takes
another 0.15 s. Knows none of the options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from launcher.base import layout

# The most, and the width of help that is not for a terminal.
WIDTH = 96
SETTINGS: dict[str, Any] = {
    "help_option_names": ["--help", "-h"],
    "max_content_width": WIDTH,
    "terminal_width": WIDTH,
}
_REST = "Other"
# A hyphen at which no line is broken; it is shown as an ordinary one.
_NO_BREAK = "\u2011"


def _fitted(get_help: Callable[[Any], str], ctx: Any) -> str:
    """The help in the terminal's width; lines of examples, too, break between words."""
    width = layout.terminal_width(sys.stdout)
    ctx.terminal_width = min(WIDTH, width or WIDTH)
    ctx.formatter_class = _whole_words(ctx.formatter_class)
    return layout.fit(get_help(ctx).replace(_NO_BREAK, "-"), width)


def _whole_words(formatter: Any) -> Any:
    """That formatter, which would break lines after the hyphens in words and options."""

    class WholeWords(formatter):
        def write_text(self, text: str) -> None:
            super().write_text(text.replace("-", _NO_BREAK))

        def write_dl(self, rows: Any, *more: Any, **named: Any) -> None:
            super().write_dl([(term, text.replace("-", _NO_BREAK)) for term, text in rows], *more, **named)

    return WholeWords


class GroupedHelp(TyperGroup):
    """The root command: a section for each group of options, then the verbs."""

    def get_help(self, ctx: Any) -> str:
        return _fitted(super().get_help, ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        verbs = [(name, self.commands[name].get_short_help_str(WIDTH)) for name in self.commands]
        with formatter.section("Verbs"):
            formatter.write_dl(verbs)


class CommandHelp(TyperCommand):
    """A verb: its arguments, then its options."""

    def get_help(self, ctx: Any) -> str:
        return _fitted(super().get_help, ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            is_argument = parameter.param_type_name == "argument"
            group = "Arguments" if is_argument else parameter.rich_help_panel or _REST
            groups.setdefault(group, []).append(record)
    rest = groups.pop(_REST, None)
    for group, records in [*groups.items(), *([(_REST, rest)] if rest else [])]:
        with formatter.section(group):
            formatter.write_dl(records)
