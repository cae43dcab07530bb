"""Runs the tests of mutants against the broken tree, and against the whole one in the same way.

Each runs in a fork: of one server for each environment (`mutant_server.py`). Tests that use the fixture
`engine` share one engine of the whole tree, for as long as it is sound; where what is broken is in the
engine's own process, they get one of the broken tree (`mutant_engine_server.py`). Everything is started by
the first who needs it, and has folders of its own: sessions run beside each other.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.environment import REPOSITORY, runtime_environ, runtime_python
from tests.support.imports import Imports
from tests.support.lane import LANE_VARIABLE
from tests.support.mutants import RUNTIME_TESTS, Copies, Mutant

# A fork hangs when it says nothing for so long: it says something after each test.
_QUIET_SECONDS = 600
# What takes long to import and is not ours.
_RUNTIMES_MODULES = (
    "aiohttp.web", "hypothesis", "numpy", "openai", "peft", "pydantic", "safetensors.torch",
    "starlette.routing", "torch", "torchtune", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
_MODULES = ("aiohttp.web", "dspy", "httpx", "hypothesis", "pydantic", "typer.testing")
_ENGINE = "runtime/engine/server.py"


@dataclass(frozen=True)
class Outcome:
    """pytest's exit code, the tests that failed, and the end of what it printed."""

    exit_code: int
    failed: tuple[str, ...]
    output: str

    @property
    def caught(self) -> bool:
        """Tests ran and failed: 1. A tree that no longer imports (2 and up) has caught nothing."""
        return self.exit_code == 1


class MutantRuns:
    """One session's: its copies of the tree are in `folder`."""

    def __init__(self, folder: Path, tree: Path = REPOSITORY) -> None:
        self.copies = Copies(folder, tree)
        self._in_the_engine = Imports(self.copies.whole).closure([_ENGINE], "runtime")
        self._servers: dict[bool, _Server] = {}
        self._engines = _Engines(self.copies.whole)

    def run(self, mutant: Mutant) -> Outcome:
        """Its tests against the tree it breaks, until one fails."""
        own = not self._in_the_engine.isdisjoint(mutant.broken(self.copies.symbols))
        with self.copies.broken_by(mutant) as tree, self._engines.of(tree if own else None) as engine:
            return self._run(tree, mutant.tests, engine, "-x")

    def run_whole(self, mutants: Iterable[Mutant]) -> list[Outcome]:
        """All their tests against the tree as it is: of each environment in one fork."""
        outcomes = []
        for runtime in (True, False):
            tests = {test for mutant in mutants if mutant.in_the_runtime == runtime for test in mutant.tests}
            if tests:
                with self._engines.of(None) as engine:
                    outcomes.append(self._run(self.copies.whole, tuple(sorted(tests)), engine))
        return outcomes

    def close(self) -> None:
        """End what was started."""
        for server in self._servers.values():
            server.close()
        self._engines.close()

    def _run(self, tree: Path, tests: tuple[str, ...], engine: _Wanted, *words: str) -> Outcome:
        runtime = tests[0].startswith(RUNTIME_TESTS)
        if runtime not in self._servers:
            self._servers[runtime] = self._start(runtime)
        server = self._servers[runtime]
        confined = ("--confcutdir", str(tree / RUNTIME_TESTS)) if runtime else ()
        asked = {"tree": str(tree), "tests": tests, "quiet_seconds": _QUIET_SECONDS}
        said = server.ask(**asked, words=[*words, *confined])
        while "wants" in said:
            said = server.ask(**engine.get())
        return Outcome(said["exit_code"], tuple(said["failed"]), said["output"])

    def _start(self, runtime: bool) -> _Server:
        python = str(runtime_python()) if runtime else sys.executable
        modules = _RUNTIMES_MODULES if runtime else _MODULES
        return _Server(self.copies.whole, python, "tests.support.mutant_server", *modules)


class _Server:
    """A process that answers one JSON line with one, run by the code of the whole tree."""

    def __init__(self, tree: Path, python: str, module: str, *words: str) -> None:
        environ = runtime_environ(tree) | {LANE_VARIABLE: "mutants"}
        # One copy of the tree is broken and mended for all of them: what is compiled once, is.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [python, "-m", module, *words],
            cwd=tree,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **ask: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait(timeout=60)}")
        return json.loads(line)

    def close(self) -> None:
        """It ends when its input does, and what it started with it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


class _Engines:
    """The shared engine, and one of a broken tree at a time."""

    def __init__(self, whole: Path) -> None:
        self._whole = whole
        self._server: _Server | None = None
        self._shared: dict[str, Any] = {}

    @contextlib.contextmanager
    def of(self, broken: Path | None) -> Iterator[_Wanted]:
        """What to ask for an engine: of the broken tree, ended with the block; None: the shared one."""
        wanted = _Wanted(self, broken)
        try:
            yield wanted
        finally:
            if broken is not None and "engine" in wanted.engine:
                self._ask(end=wanted.engine["engine"])

    def shared(self) -> dict[str, Any]:
        """A mutant may have killed the one there was."""
        if "engine" in self._shared and not self._ask(sound=self._shared["engine"])["sound"]:
            self._ask(end=self._shared["engine"])
            self._shared = {}
        if "engine" not in self._shared:
            self._shared = self.start(self._whole)
        return self._shared

    def start(self, tree: Path) -> dict[str, Any]:
        return self._ask(start=str(tree))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _ask(self, **ask: Any) -> dict[str, Any]:
        if self._server is None:
            self._server = _Server(self._whole, str(runtime_python()), "tests.support.mutant_engine_server")
        return self._server.ask(**ask)


class _Wanted:
    """An engine that is started if it is asked for."""

    def __init__(self, engines: _Engines, broken: Path | None) -> None:
        self._engines = engines
        self._broken = broken
        self.engine: dict[str, Any] = {}

    def get(self) -> dict[str, Any]:
        """How to reach it, or why it did not come up."""
        if not self.engine:
            self.engine = self._engines.start(self._broken) if self._broken else self._engines.shared()
        return self.engine
