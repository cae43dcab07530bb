"""Asking a person before money is spent or something is removed.

Neighbours: `quote.py` asks before GPUs are rented, `verbs.py` before `gc` removes. Without a terminal nobody
is ever asked.
"""

from __future__ import annotations

import sys

from launcher.output import Output


def somebody_is_here() -> bool:
    """Whether a question would be seen and could be answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def can_ask(output: Output) -> bool:
    """With `--json` a program is reading, which answers no questions."""
    return not output.as_json and somebody_is_here()


def agreed(output: Output, question: str) -> bool:
    """The answer; no without one."""
    output.note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
