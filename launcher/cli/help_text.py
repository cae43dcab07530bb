"""The layout of `launch --help`: plain text of one width, options grouped by subject.

Neighbours: `commands.py` names the groups. Without it typer would draw boxes through rich, which takes
another 0.15 s. Knows none of the options.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

# Help is the same on every terminal.
WIDTH = 96
SETTINGS: dict[str, Any] = {
    "help_option_names": ["--help", "-h"],
    "max_content_width": WIDTH,
    "terminal_width": WIDTH,
}
_REST = "Other"


class GroupedHelp(TyperGroup):
    """The root command: a section for each group of options, then the verbs."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        verbs = [(name, self.commands[name].get_short_help_str(WIDTH)) for name in self.commands]
        with formatter.section("Verbs"):
            formatter.write_dl(verbs)


class CommandHelp(TyperCommand):
    """A verb: its arguments, then its options."""

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
