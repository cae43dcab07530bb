"""Holds a walk against the code: the functions that have a value in their hands, from where it comes in to
where it acts.

Neighbours: `unit/walks.toml` has the walks and tells what a row means, `unit/test_walks.py` bounds them;
`import_graph.py` tells what a file imports. Reads the code, runs none of it: it sees that neighbours in a
walk call each other, and not that the value is what they hand on. A function that is called and comes back
may be left out unseen.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.import_graph import ImportGraph


@dataclass(frozen=True)
class Stop:
    """A function that has the value, and its `name` there. `way`: how it came from the stop before."""

    file: str
    function: str
    name: str
    way: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"

    @property
    def called(self) -> str:
        """The word by which a caller names it: a function's, or the class's whose object it makes."""
        owner, _, last = self.function.rpartition(".")
        return owner if last == "__init__" else last


class Walks:
    """Judges walks in one tree. `floors`: its folders, and files that stand higher, from the ground up."""

    def __init__(self, root: Path, floors: Sequence[str]) -> None:
        self._root = root
        self._floors = floors
        self._graph = ImportGraph(root)
        self._functions: dict[str, dict[str, ast.AST]] = {}

    def climbs(self, walk: Sequence[Stop]) -> list[Stop]:
        """The stops that stand above the one before."""
        return [
            there
            for here, there in itertools.pairwise(walk)
            if self._floor(there.file) > self._floor(here.file)
        ]

    def problems(self, walk: Sequence[Stop]) -> list[str]:
        """The rows that the code does not bear out, each with the reason."""
        missing = [why for stop in walk if (why := self._why_missing(stop))]
        if missing:
            return missing
        return [
            f"{there}: {why}"
            for place, (here, there) in enumerate(itertools.pairwise(walk), start=1)
            if (why := self._why_apart(here, there, walk[:place]))
        ]

    def _why_missing(self, stop: Stop) -> str | None:
        if not (self._root / stop.file).is_file():
            return f"{stop}: there is no such file"
        if stop.function not in self._inside(stop.file):
            return f"{stop}: there is no such function"
        return None if stop.name in self._words(stop) else f"{stop}: nothing is called {stop.name}"

    def _why_apart(self, here: Stop, there: Stop, before: Sequence[Stop]) -> str | None:
        """The reason why the value cannot come from here to there, as its row tells; None if it can."""
        match there.way.split():
            case []:
                return None if self._calls(here, there) else f"{here} does not call it"
            case ["back"]:
                # Through callers that only hand it on: these have their rows on the way there.
                came_by = any((stop.file, stop.function) == (there.file, there.function) for stop in before)
                return None if came_by or self._calls(there, here) else f"it has not called {here}"
            case ["kept", attribute]:
                together = _same_object(here, there) and attribute in self._words(here) & self._words(there)
                return None if together else f"it keeps no {attribute} with {here}"
            case ["over", word]:
                sent = any(self._mentions(stop, word) for stop in _of_one_process(before))
                return None if sent and self._mentions(there, word) else f"{word} is not on both sides"
            case ["by", listed]:
                return self._why_not_listed(here, there, listed)
            case ["back", "by", listed]:
                return self._why_not_listed(there, here, listed)
        return f"{there.way!r} is no way"

    def _why_not_listed(self, caller: Stop, called: Stop, listed: str) -> str | None:
        file, _, symbol = listed.partition(":")
        table = Stop(file, symbol, called.called)
        if (why := self._why_missing(table)) is not None:
            return why
        return None if self._imports(caller.file, file) else f"{caller} does not know {listed}"

    def _calls(self, caller: Stop, called: Stop) -> bool:
        return called.called in self._words(caller) and self._imports(caller.file, called.file)

    def _imports(self, file: str, other: str) -> bool:
        name = self._graph.name_of(self._root / other)
        return file == other or name in self._graph.imported(self._root / file)

    def _mentions(self, stop: Stop, word: str) -> bool:
        return any(word == it or (word in it and not it.isidentifier()) for it in self._words(stop))

    def _words(self, stop: Stop) -> set[str]:
        """Every name, attribute, argument, keyword and text in a function, its decorators too."""
        return set(_words(self._inside(stop.file)[stop.function]))

    def _inside(self, file: str) -> dict[str, ast.AST]:
        """A file's functions, classes and constants by their qualified names."""
        if file not in self._functions:
            self._functions[file] = dict(_symbols(ast.parse((self._root / file).read_text()), ""))
        return self._functions[file]

    def _floor(self, file: str) -> int:
        return self._floors.index(file if file in self._floors else file.rpartition("/")[0])


def _same_object(here: Stop, there: Stop) -> bool:
    owners = {(stop.file, stop.function.rpartition(".")[0]) for stop in (here, there)}
    return len(owners) == 1 and "." in here.function


def _of_one_process(walk: Sequence[Stop]) -> Iterator[Stop]:
    """The last stops of a walk, back to where the value came over from elsewhere."""
    for stop in reversed(walk):
        yield stop
        if stop.way.startswith("over "):
            return


def _symbols(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield f"{prefix}{child.name}", child
                yield from _symbols(child, f"{prefix}{child.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{prefix}{name}", child


def _words(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.arg(arg=found):
                yield found
            case ast.keyword(arg=str(found)) | ast.Constant(value=str(found)):
                yield found
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                yield found
