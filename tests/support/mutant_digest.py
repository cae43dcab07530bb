"""What of the tree a mutant's outcome is known for, as one digest.

What it changes, the symbols it breaks, the test files it names, their conftests, and what these import of
`tests`. By content, not dates, history or a symbol's file: every clone of a commit agrees, a shallow one too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.support.imports import Imports
from tests.support.mutants import RUNTIME_TESTS, Mutant
from tests.support.symbols import Symbols

_CHARACTERS = 16
# Where a test runs in a whole suite; a mutant's run has no lanes.
_LANES = frozenset(
    f"tests/support/{name}.py" for name in ("lane", "lane_reports", "lanes", "places", "turns")
)


class Digests:
    """Of the mutants of one tree; each file is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._imports = Imports(root)
        self._contents: dict[str, str] = {}

    def of(self, mutant: Mutant) -> str:
        """The same for as long as nothing the mutant's outcome is known for has changed."""
        digest = hashlib.sha256()
        for change in mutant.changes:
            digest.update(f"{change}\n{self._source(change.symbol, change.find)}\n".encode())
        for name in sorted(self.files(mutant)):
            digest.update(f"{name} {self._content(name)}\n".encode())
        return digest.hexdigest()[:_CHARACTERS]

    def files(self, mutant: Mutant) -> set[str]:
        """All files of its tests, from the root; one that is missing is a content as well."""
        tests = {test.partition("::")[0] for test in mutant.tests}
        conftests = {name for test in tests for name in self._conftests(test)}
        return (
            tests
            | self._imports.closure(filter(self._is_file, tests), "tests")
            | self._imports.closure(filter(self._is_file, conftests), "tests", _LANES)
        )

    @cached_property
    def _symbols(self) -> Symbols:
        return Symbols(self._root)

    def _source(self, symbol: str, find: str) -> str:
        """A text that is not found just once is said by the run, not here."""
        try:
            return self._symbols.source(self._symbols.find(symbol, find))
        except LookupError as error:
            return str(error)

    def _conftests(self, test: str) -> Iterator[str]:
        """Those pytest loads for a test: the runtime's pytest loads none above `tests/runtime`."""
        for folder in Path(test).parents:
            yield (folder / "conftest.py").as_posix()
            if f"{folder.as_posix()}/" == RUNTIME_TESTS:
                return

    def _is_file(self, name: str) -> bool:
        return (self._root / name).is_file()

    def _content(self, name: str) -> str:
        if name not in self._contents:
            whole = (self._root / name).read_bytes() if self._is_file(name) else b"missing"
            self._contents[name] = hashlib.sha256(whole).hexdigest()
        return self._contents[name]
