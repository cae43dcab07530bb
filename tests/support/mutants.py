"""Breaks a copy of the tree with one patch, so that a test can be seen to notice.

`Mutant` is a patch file: `# test: NODEID` (one or more), then a diff. Knows nothing of which mutants run
(`mutant_selection.py`) nor of how their tests do (`mutant_runs.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.environment import REPOSITORY

PATCHES = "tests/mutations"
RUNTIME_TESTS = "tests/runtime/"
# Seconds in 2033, later than any file of the tree.
_BROKEN_AT = 2_000_000_000


@dataclass(frozen=True)
class Mutant:
    """One patch, the tests that must fail under it, and the files it breaks."""

    path: Path
    tests: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Read the header lines in front of the diff, and what the diff is of."""
        lines = path.read_text().splitlines()
        tests = tuple(_after("# test:", lines))
        if not tests:
            raise ValueError(f"{path.name}: no `# test: NODEID` line")
        if len({test.startswith(RUNTIME_TESTS) for test in tests}) > 1:
            raise ValueError(f"{path.name}: its tests run in two environments")
        return cls(path, tests, tuple(_after("+++ b/", lines)))

    @classmethod
    def all(cls, tree: Path = REPOSITORY) -> list[Mutant]:
        """Every patch, in name order."""
        return [cls.read(path) for path in sorted((tree / PATCHES).glob("*.patch"))]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def in_the_runtime(self) -> bool:
        """Whether its tests are of the runtime's environment."""
        return self.tests[0].startswith(RUNTIME_TESTS)


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

    @contextlib.contextmanager
    def broken_by(self, mutant: Mutant) -> Iterator[Path]:
        """The broken tree; ValueError when the patch no longer fits and must be renewed."""
        self._apply(mutant)
        try:
            yield self.broken
        finally:
            for name in mutant.files:
                (self.broken / name).unlink()
                if (self.whole / name).exists():
                    shutil.copy2(self.whole / name, self.broken / name)

    def _apply(self, mutant: Mutant) -> None:
        patch = self.whole / PATCHES / mutant.path.name
        done = subprocess.run(
            ["git", "apply", "-p1", patch], cwd=self.broken, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"{mutant.path.name} no longer applies: {done.stderr.strip()}")
        for name in mutant.files:
            # Python tells byte code by the source's size and second, and two mutants may agree in both.
            os.utime(self.broken / name, (next(self._seconds),) * 2)


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


def _after(start: str, lines: list[str]) -> Iterator[str]:
    return (line.removeprefix(start).strip() for line in lines if line.startswith(start))
