"""Shows the tests of `tests/runtime` to a pytest that has no torch, and runs them in one that has.

Each test function becomes one item here (its parameters stay inside). All selected items run in
one child pytest, in the runtime's environment, started when the first of them is reached; its
outcomes arrive over a pipe, so an item ends when its test does.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import processes
from tests.support.environment import REPOSITORY, runtime_environ, runtime_python
from tests.support.remote_report import DESCRIPTOR_VARIABLE, function_of

# The marks that choose tests; the others mean something only inside the runtime's own pytest.
_MARKS = {"slow", "long"}
_PIPE_BYTES = 1 << 20
FOLDER = REPOSITORY / "tests" / "runtime"


class RemoteError(Exception):
    """A test failed in the runtime's environment; the text is that pytest's own."""


class RemoteFolder(pytest.Directory):
    """`tests/runtime`: collected without importing its conftest, which belongs to the other environment."""

    def collect(self) -> Iterator[pytest.Collector]:
        for path in sorted(self.path.glob("test_*.py")):
            yield RemoteFile.from_parent(self, path=path)


class RemoteFile(pytest.File):
    """A test file of the runtime, read but never imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        tree = ast.parse(self.path.read_text(), str(self.path))
        shared = {name for node in tree.body if _is_pytestmark(node) for name in _marks_in([node])}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                item = RemoteItem.from_parent(self, name=node.name)
                for mark in shared | _marks_in(node.decorator_list):
                    item.add_marker(mark)
                yield item


class RemoteItem(pytest.Item):
    """One test function of the runtime."""

    def runtest(self) -> None:
        reports = _child(self.session).wait_for(self.nodeid)
        failed = [
            f"{report['nodeid']} ({report['when']})\n{report['text']}"
            for report in reports
            if report["outcome"] == "failed"
        ]
        if failed:
            raise RemoteError("\n\n".join(failed))
        skipped = [report["text"] for report in reports if report["outcome"] == "skipped"]
        if skipped:
            pytest.skip(skipped[0])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RemoteError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class RemoteSession:
    """The child pytest and what it has said so far."""

    def __init__(self, nodeids: list[str]) -> None:
        reader, writer = os.pipe()
        # Nobody may read for minutes; it must not wait for that.
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._cases: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._reports: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._process = subprocess.Popen(
            [runtime_python(), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider",
             "-p", "tests.support.remote_report", "--rootdir", REPOSITORY, "--confcutdir", FOLDER, *nodeids],
            cwd=REPOSITORY,
            env={**runtime_environ(), DESCRIPTOR_VARIABLE: str(writer)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
            # As on Ctrl-C, its fixtures end what they started, however this process goes.
            preexec_fn=processes.in_child(signal.SIGINT),
        )  # fmt: skip
        os.close(writer)
        self._lines = os.fdopen(reader, encoding="utf-8")

    def wait_for(self, function: str) -> list[dict[str, Any]]:
        """Reports of every case of one test function; reads on until the last of them has ended."""
        while not self._cases or self._finished[function] < self._cases[function]:
            line = self._lines.readline()
            if not line:
                break
            self._take(json.loads(line))
        if not self._cases[function] or self._finished[function] < self._cases[function]:
            raise RemoteError(f"the runtime's pytest ended without running {function}:\n{self._tail()}")
        return self._reports[function]

    def close(self) -> None:
        """End the child; it still runs only when the session here was interrupted."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._lines.close()
        self._process.wait(timeout=60)
        self._log.close()

    def _take(self, report: dict[str, Any]) -> None:
        if report["when"] == "collected":
            self._cases.update(report["cases"])
        elif report["when"] == "finish":
            self._finished[function_of(report["nodeid"])] += 1
        else:
            self._reports[function_of(report["nodeid"])].append(report)

    def _tail(self) -> str:
        self._process.wait(timeout=60)
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-6000:]


_CHILD = pytest.StashKey[RemoteSession]()


def _child(session: pytest.Session) -> RemoteSession:
    """The child that runs all selected items; started by the first who asks."""
    child = session.config.stash.get(_CHILD, None)
    if child is None:
        selected = [item.nodeid for item in session.items if isinstance(item, RemoteItem)]
        child = session.config.stash[_CHILD] = RemoteSession(selected)
    return child


def start_early(session: pytest.Session) -> None:
    """Run the fast items of the runtime beside those here; slow ones want the machine to themselves."""
    slow = any(item.get_closest_marker("slow") for item in session.items)
    if not slow and any(isinstance(item, RemoteItem) for item in session.items):
        _child(session)


def end_child(config: pytest.Config) -> None:
    """End the child pytest, if one was started."""
    child = config.stash.get(_CHILD, None)
    if child is not None:
        child.close()


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
