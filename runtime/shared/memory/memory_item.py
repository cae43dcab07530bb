"""One line of a memory table: its name, size and reason.

Neighbours: `trainer.py` and `engine.py` make lists of them, `planning.py` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLine:
    """`size` in bytes, on one GPU."""

    name: str
    size: int
    why: str


def total(lines: Iterable[MemoryLine]) -> int:
    """Bytes of all."""
    return sum(line.size for line in lines)


def format_count(number: float) -> str:
    """A count in words: "41 M", "7.6 B", "4,096"."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            shown = number / size
            return f"{shown:.1f} {unit}" if shown < 10 else f"{shown:.0f} {unit}"
    return f"{number:,.0f}"
