"""Shows the tests of `tests/runtime` and `tests/gpu` to a pytest that has no torch; they run in the runtime's
environment, those of `tests/gpu` in its CUDA build.

Each test function becomes one item here (its parameters stay inside), which ends when all its cases have, in
a lane of the runtime's environment (`lanes.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import lanes, measured
from tests.support.environment import REPOSITORY

# The marks that choose tests; the others mean something only inside the runtime's own pytest.
_MARKS = {"slow", "long", "process"}
GPU = REPOSITORY / "tests" / "gpu"
FOLDERS = (REPOSITORY / "tests" / "runtime", GPU)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Hand the folders to the collector that knows their environment."""
    if path in FOLDERS:
        return RemoteFolder.from_parent(parent, path=path)
    return None


class RemoteError(Exception):
    """A test failed in the runtime's environment; the text is that pytest's own."""


class RemoteFolder(pytest.Directory):
    """One of the folders: its files are read; fixtures belong to the other environment."""

    def collect(self) -> Iterator[pytest.Collector]:
        for path in sorted(self.path.glob("test_*.py")):
            yield RemoteFile.from_parent(self, path=path)


class RemoteFile(pytest.File):
    """A test file of the runtime, read but never imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        tree = ast.parse(self.path.read_text(), str(self.path))
        shared = {name for node in tree.body if _is_pytestmark(node) for name in _marks_in([node])}
        shared |= {"gpu"} if self.path.parent == GPU else set()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                item = RemoteItem.from_parent(self, name=node.name)
                for mark in shared | _marks_in(node.decorator_list):
                    item.add_marker(mark)
                yield item


class RemoteItem(pytest.Item):
    """One test function of the runtime."""

    def runtest(self) -> None:
        reports = lanes.reports(self)
        measured.keep(self.config, reports)
        failed = [f"{report.nodeid} ({report.when})\n{_text(report)}" for report in reports if report.failed]
        if failed:
            raise RemoteError("\n\n".join(failed))
        skipped = [str(report.longrepr[2]) for report in reports if report.skipped]  # type: ignore[index]
        if skipped:
            pytest.skip(skipped[0])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RemoteError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def _text(report: pytest.TestReport) -> str:
    return report.longreprtext + "".join(f"\n--- {title}\n{content}" for title, content in report.sections)


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def _marks_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the marks in decorators or in a `pytestmark` line (parametrize and the like stay inside)."""
    return {
        inner.attr
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and ast.unparse(inner.value) == "pytest.mark"
        and inner.attr in _MARKS
    }
