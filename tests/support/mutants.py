"""Breaks a copy of the tree on purpose, so that a test can be seen to notice.

`tests/mutations/*.toml` have the mutants. Each names a symbol, a text in it, what stands there instead, and
the tests that must fail:

    [[mutant]]
    id = "c16"
    symbol = "advantages"
    find = "    return centred / (spread + _EPSILON)"
    replace = "    return centred"
    test = "tests/runtime/test_losses.py::test_c16_advantages_are_those_of_the_group"

`find` stands once in all symbols of that name, wherever they are: a file or a function may be moved. A mutant
that breaks several places has a table `change` for each. Knows nothing of which mutants run
(`mutant_selection.py`) nor of how their tests do (`mutant_runs.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.environment import REPOSITORY
from tests.support.symbols import Symbols

FOLDER = "tests/mutations"
RUNTIME_TESTS = "tests/runtime/"
# Seconds in 2033, later than any file of the tree.
_BROKEN_AT = 2_000_000_000


@dataclass(frozen=True)
class Change:
    """A text in a symbol, and what stands there in the broken tree."""

    symbol: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """What it changes, and the tests that must fail then."""

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Mutant:
        """One `[[mutant]]`. Raises ValueError where its tests run in two environments."""
        said = table["test"]
        tests = (said,) if isinstance(said, str) else tuple(said)
        if len({test.startswith(RUNTIME_TESTS) for test in tests}) != 1:
            raise ValueError(f"{table['id']}: its tests run in two environments, or there are none")
        changes = [Change(it["symbol"], it["find"], it["replace"]) for it in table.get("change", [table])]
        return cls(table["id"], tuple(changes), tests)

    @classmethod
    def all(cls, tree: Path = REPOSITORY) -> list[Mutant]:
        """Every mutant, in name order. Raises ValueError where two have one name."""
        files = sorted((tree / FOLDER).glob("*.toml"))
        mutants = [cls.read(it) for file in files for it in tomllib.loads(file.read_text())["mutant"]]
        if len({mutant.name for mutant in mutants}) < len(mutants):
            raise ValueError("two mutants have one name")
        return sorted(mutants, key=lambda mutant: mutant.name)

    @property
    def in_the_runtime(self) -> bool:
        """Whether its tests are of the runtime's environment."""
        return self.tests[0].startswith(RUNTIME_TESTS)

    def broken(self, symbols: Symbols) -> dict[str, str]:
        """The files it breaks, as they are then. Raises ValueError where a text is not found just once."""
        edits: dict[str, list[tuple[int, Change]]] = {}
        for change in self.changes:
            try:
                place = symbols.find(change.symbol, change.find)
            except LookupError as error:
                raise ValueError(f"mutant {self.name} no longer applies: {error}") from None
            start = place.start + symbols.source(place).index(change.find)
            edits.setdefault(place.file, []).append((start, change))
        return {file: _edited(symbols.text(file), found) for file, found in edits.items()}


class Copies:
    """The tree twice: `whole` stays as it is, `broken` is broken by one mutant at a time and mended again.

    One copy for all mutants, so that byte code is made once: of a broken file, too, it is told from that of
    any other state of it.
    """

    def __init__(self, folder: Path, tree: Path = REPOSITORY) -> None:
        self.whole = folder / "whole"
        self.broken = folder / "broken"
        _copy(tree, self.whole)
        shutil.copytree(self.whole, self.broken)
        self._seconds = itertools.count(_BROKEN_AT)

    @cached_property
    def symbols(self) -> Symbols:
        """Those of the whole tree."""
        return Symbols(self.whole)

    @contextlib.contextmanager
    def broken_by(self, mutant: Mutant) -> Iterator[Path]:
        """The broken tree; ValueError when the mutant no longer fits and must be renewed."""
        files = mutant.broken(self.symbols)
        try:
            for name, text in files.items():
                (self.broken / name).write_text(text)
                # Python tells byte code by the source's size and second, and two mutants may agree in both.
                os.utime(self.broken / name, (next(self._seconds),) * 2)
            yield self.broken
        finally:
            for name in files:
                shutil.copy2(self.whole / name, self.broken / name)


def _edited(text: str, edits: list[tuple[int, Change]]) -> str:
    """From the last place to the first, so that none moves another."""
    for start, change in sorted(edits, key=lambda edit: -edit[0]):
        text = text[:start] + change.replace + text[start + len(change.find) :]
    return text


def _copy(tree: Path, into: Path) -> None:
    """Copy the files git knows or would know; a mutation never touches the tree itself."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        source = tree / name
        if name and source.is_file():
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
