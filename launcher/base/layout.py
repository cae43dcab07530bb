"""Fits text to the width of a terminal: lines break between words, never inside one.

Neighbours: `console/output.py` fits everything that it prints to a terminal, `cli/help_text.py` the help, and
`client/dspy/report.py` the lines of steps. A word that is longer than the width stays whole. Pure but for
`terminal_width`.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import TextIO

# Narrower than this, text would be a column of single words.
_MIN_WIDTH = 20
# A cell keeps its own column in the lines below only if this much room is left for it.
_MIN_CELL = 24
_CELL = re.compile(r"(?<=\S) {2,}(?=\S)")
_COMMAND = re.compile(r"(\s*(?:Hint|fix): )((?:launch|pip|uv|sudo) .*)")
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")


def terminal_width(stream: TextIO) -> int | None:
    """The columns of the terminal; None for a file or a pipe, whose lines are never broken."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (AttributeError, OSError, ValueError):  # a stream of the user's own making
        return None
    return columns or None  # a container may report 0


def fit(text: str, width: int | None) -> str:
    """The text in lines of that width."""
    if width is None or width < _MIN_WIDTH:
        return text
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def columns(rows: list[list[str]]) -> str:
    """Rows as aligned columns; the first row is the heading."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def table(rows: list[list[str]], width: int | None) -> str:
    """The same; in a terminal that is too narrow, a block of lines for each row."""
    whole = columns(rows)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    heading, *rest = rows
    label = max(map(len, heading))
    blocks = []
    for row in rest:
        named = zip(heading[1:], row[1:], strict=True)
        blocks.append("\n".join([row[0], *(f"  {name:<{label}}  {cell}" for name, cell in named)]))
    return "\n".join(blocks)


def _broken(line: str, width: int) -> str:
    if command := _COMMAND.fullmatch(line):
        return _broken_command(command[1], command[2], width)
    indent = len(line) - len(line.lstrip())
    cells = [it.end() for it in _CELL.finditer(line) if it.end() <= width - _MIN_CELL]
    return "\n".join(_wrapped(line, width, cells[-1] if cells else min(indent + 2, width // 2)))


def _wrapped(line: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def _broken_command(head: str, command: str, width: int) -> str:
    """A command over several lines that a shell takes for one when they are pasted."""
    lines, line, comment = [], head.rstrip(), False
    for word in _SHELL_WORD.findall(command):
        if len(line) + 1 + len(word) + 2 > width and line.strip() != head.strip():
            lines.append(line if comment else f"{line} \\")
            line = "    #" if comment else "   "
        comment = comment or word.startswith("#")
        line = f"{line} {word}"
    return "\n".join([*lines, line])
