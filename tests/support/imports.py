"""Which modules of our own a file names, and those name, and so on: by reading them, not by running them.

Neighbours: `mutant_digest.py` asks what a test depends on, `mutant_runs.py` what an engine's process has in
it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_DOTTED = re.compile(r"\w+(\.\w+)+")


class Imports:
    """Of one tree, each file read once. Files are named from the tree's root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._named: dict[str, tuple[str, ...]] = {}

    def closure(self, starts: Iterable[str], package: str, without: Collection[str] = ()) -> set[str]:
        """`starts`, and the files of `package` they import, wherever in a file the import stands.

        A file of `without` is left out, and what only such files import.
        """
        found: set[str] = set()
        waiting = list(starts)
        while waiting:
            name = waiting.pop()
            if name not in found and name not in without:
                found.add(name)
                waiting += (file for file in self._named_in(name) if file.startswith(f"{package}/"))
        return found

    def _named_in(self, name: str) -> tuple[str, ...]:
        if name not in self._named:
            tree = ast.parse((self._root / name).read_text(), name)
            files = (file for dotted in dict.fromkeys(_names(tree)) for file in self._files(dotted))
            self._named[name] = tuple(dict.fromkeys(files))
        return self._named[name]

    def _files(self, dotted: str) -> Iterator[str]:
        """The module, and the packages it is in; what is behind it is a name in that module."""
        folder = Path()
        for part in dotted.split("."):
            module = folder / f"{part}.py"
            if (self._root / module).is_file():
                yield module.as_posix()
                return
            folder /= part
            package = folder / "__init__.py"
            if (self._root / package).is_file():
                yield package.as_posix()


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.value  # another Python is to run it, or vLLM to import it
