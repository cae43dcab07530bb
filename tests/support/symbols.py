"""Where the functions, classes and constants of the product are, by their qualified names.

`Symbols` finds the one place where a text stands in a symbol, whichever file has it. Neighbours: `mutants.py`
breaks the tree there, `mutant_digest.py` asks for the symbol's source. Reads files, runs none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("launcher", "runtime")


@dataclass(frozen=True)
class Place:
    """A symbol in a file: from the start of its first line, a decorator's too, to the end of its last."""

    file: str
    start: int
    end: int


class Symbols:
    """Of one tree. A symbol is `function`, `Class.method`, `function.inner`, `CONSTANT` or `Class.FIELD`."""

    def __init__(self, root: Path) -> None:
        self._texts: dict[str, str] = {}
        self._places: defaultdict[str, list[Place]] = defaultdict(list)
        for half in PRODUCT:
            for path in sorted((root / half).rglob("*.py")):
                self._read(path.relative_to(root).as_posix(), path.read_text())

    def find(self, symbol: str, text: str) -> Place:
        """The place of this name that has the text. Raises LookupError where that is not just once."""
        places = self._places.get(symbol, [])
        if not places:
            raise LookupError(f"nothing is called {symbol}")
        counts = {place: self.source(place).count(text) for place in places}
        if sum(counts.values()) != 1:
            raise LookupError(f"{symbol} has {text!r} {sum(counts.values())} times")
        return max(places, key=counts.__getitem__)

    def source(self, place: Place) -> str:
        """A symbol's own lines."""
        return self._texts[place.file][place.start : place.end]

    def text(self, file: str) -> str:
        """A whole file."""
        return self._texts[file]

    def _read(self, file: str, text: str) -> None:
        self._texts[file] = text
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for symbol, first, last in _symbols(ast.parse(text, file), ""):
            self._places[symbol].append(Place(file, starts[first - 1], starts[last]))


def _symbols(node: ast.AST, prefix: str, local: bool = False) -> Iterator[tuple[str, int, int]]:
    """Each one's qualified name, its first and its last line, counted from 1; no variable of a function."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                first = min(part.lineno for part in (child, *child.decorator_list))
                yield f"{prefix}{child.name}", first, child.end_lineno or first
                yield from _symbols(child, f"{prefix}{child.name}.", not isinstance(child, ast.ClassDef))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if (
                not local
            ):
                yield f"{prefix}{name}", child.lineno, child.end_lineno or child.lineno
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from _symbols(child, prefix, local)
