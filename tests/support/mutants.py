"""Breaks a copy of the tree with one patch and runs the test that must notice.

`Mutant` is a patch file: `# test: NODEID` (one or more), then a diff.
Tests of the runtime run in a fork server (`mutant_server`), so torch is imported once for all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.environment import REPOSITORY, runtime_environ, runtime_python

PATCHES = REPOSITORY / "tests" / "mutations"
_TIMEOUT_SECONDS = 300
# What runs inside vLLM's process.
_IN_THE_ENGINE = (
    "runtime/serving/engine.py",
    "runtime/serving/worker.py",
    "runtime/serving/adapter_check.py",
)


@dataclass(frozen=True)
class Mutant:
    """One patch and the tests that must fail under it."""

    path: Path
    tests: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Read the header lines in front of the diff."""
        header = [line for line in path.read_text().splitlines() if line.startswith("# ")]
        tests = tuple(line.removeprefix("# test:").strip() for line in header if line.startswith("# test:"))
        if not tests:
            raise ValueError(f"{path.name}: no `# test: NODEID` line")
        return cls(path, tests)

    @property
    def may_share_engine(self) -> bool:
        """Whether its tests ask an engine whose process the mutation leaves alone."""
        files = {REPOSITORY / test.partition("::")[0] for test in self.tests}
        asks = any("RunningEngine" in file.read_text() for file in files)
        diff = self.path.read_text()
        return asks and not any(f"+++ b/{file}" in diff for file in _IN_THE_ENGINE)

    @classmethod
    def all(cls) -> list[Mutant]:
        """Every patch, in name order."""
        return [cls.read(path) for path in sorted(PATCHES.glob("*.patch"))]


@dataclass(frozen=True)
class Outcome:
    """pytest's exit code under the mutation, and the end of what it printed."""

    exit_code: int
    output: str

    @property
    def caught(self) -> bool:
        """Tests ran and failed: 1. A tree that no longer imports (2 and up) has caught nothing."""
        return self.exit_code == 1


def copy_tree(into: Path) -> Path:
    """Copy the files git knows or would know; a mutation never touches the tree itself."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source = REPOSITORY / name
        if name and source.is_file():
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return into


def apply(mutant: Mutant, tree: Path) -> None:
    """Apply the patch to a copy; one that no longer fits must be renewed, so this raises."""
    done = subprocess.run(["git", "apply", "-p1", mutant.path], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{mutant.path.name} no longer applies: {done.stderr.strip()}")


class MutantServer:
    """The fork server in the runtime's environment."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [runtime_python(), "-m", "tests.support.mutant_server"],
            cwd=REPOSITORY,
            env=runtime_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tree: Path, tests: tuple[str, ...], engine: bool = False) -> Outcome:
        """Run the tests in a fork whose code is the mutated tree."""
        assert self._process.stdin and self._process.stdout
        ask = {"tree": str(tree), "tests": tests, "timeout": _TIMEOUT_SECONDS, "engine": engine}
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the mutant server ended with {self._process.wait(timeout=10)}")
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


def run_here(tree: Path, tests: tuple[str, ...]) -> Outcome:
    """Run tests of the launcher's side against the mutated tree, in this environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tree, *tests]
    environ = {**runtime_environ(tree), "CI": ""}
    done = subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
    )
    return Outcome(done.returncode, (done.stdout + done.stderr)[-4000:])
