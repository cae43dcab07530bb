"""What a file of this tree imports of it, by reading: also packages, and modules that are named in a string.

Neighbours: `unit/test_tree.py` asks for floors and circles; `imports.py` is coarser: whatever a file names.
Knows nothing of which imports are allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_BY_NAME = {"import_module", "__import__"}
_DOTTED = re.compile(r"\w+(\.\w+)*")


class ImportGraph:
    """Of one tree. A module has its dotted name, a package that of its `__init__`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._imported: dict[Path, set[str]] = {}

    def name_of(self, path: Path) -> str:
        parts = path.relative_to(self._root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported(self, path: Path) -> set[str]:
        """All that an import in it may load, wherever it stands, also for a type checker alone.

        A package that is only on the way to a module does not count: each module of it has it there.
        """
        if path not in self._imported:
            self._imported[path] = self._read(path)
        return self._imported[path]

    def _read(self, path: Path) -> set[str]:
        name = self.name_of(path)
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(), str(path))
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute("." * node.level + (node.module or ""), package)
                inner = {f"{base}.{alias.name}" for alias in node.names}
                found |= {it if self._is_module(it) else base for it in inner}
            elif isinstance(node, ast.Call) and _called(node) in _BY_NAME and node.args:
                found |= _by_name(node.args[0], name, package, tree)
        return {it for it in found if self._is_module(it)} - {name}

    def _is_module(self, name: str) -> bool:
        if not _DOTTED.fullmatch(name):
            return False
        path = self._root / name.replace(".", "/")
        return path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, by whatever way round; each circle's, and the circles, in order."""
    reached = {name: _reached(name, imports) for name in imports}
    in_one = {name for name in imports if name in reached[name]}
    groups = {tuple(sorted(it for it in in_one & reached[name] if name in reached[it])) for name in in_one}
    return [list(group) for group in sorted(groups)]


def _reached(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [*imports[start]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports.get(name, ())
    return found


def _called(node: ast.Call) -> str:
    """The last part of the name that is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _by_name(argument: ast.expr, name: str, package: str, tree: ast.Module) -> set[str]:
    """The modules that an `import_module` may mean: its constant, or else any in the file's strings.

    So a table of names that are imported when they are asked for counts whole.
    """
    pieces = [*_pieces(argument, name)]
    if None not in pieces:
        return {_absolute("".join(filter(None, pieces)), package)}
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {*strings, *(f"{package}.{it}" for it in strings)}


def _pieces(argument: ast.expr, name: str) -> Iterator[str | None]:
    """A string's parts; None for each that only the running program knows."""
    parts: Iterable[ast.expr] = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    for part in parts:
        inner = part.value if isinstance(part, ast.FormattedValue) else part
        if isinstance(inner, ast.Constant):
            yield str(inner.value)
        else:
            yield name if isinstance(inner, ast.Name) and inner.id == "__name__" else None


def _absolute(name: str, package: str) -> str:
    """A name with leading dots, in full."""
    plain = name.lstrip(".")
    level = len(name) - len(plain)
    if not level:
        return plain
    above = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*above, plain] if plain else above)
