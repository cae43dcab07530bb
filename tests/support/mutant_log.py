"""The log of the full run of the mutations, which is in the tree: `tests/mutations/full_run.jsonl`.

    python -m tests.support.mutant_log      its summary, for tests/bench/RESULTS.md

The first line is the run, each other one a mutant that was caught. A run that was broken off has no end in
the log and goes on; until then the lines of the run before stay. `mutant_selection.py` reads it, only a full
run writes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.support.environment import REPOSITORY
from tests.support.mutants import FOLDER

LOG = f"{FOLDER}/full_run.jsonl"


@dataclass(frozen=True)
class FullRun:
    """One run of all mutations, over any number of sessions; `ended` None: it is still to be ended."""

    begun: str
    ended: str | None = None


@dataclass(frozen=True)
class Caught:
    """A mutant, broken as `digest` says, was caught by these tests in the full run that began at `run`."""

    mutant: str
    digest: str
    run: str
    date: str
    commit: str
    seconds: float
    tests: tuple[str, ...]


class Log:
    """Read anew at each question: two sessions may write it."""

    def __init__(self, path: Path = REPOSITORY / LOG) -> None:
        self._path = path

    def read(self) -> tuple[FullRun | None, dict[str, Caught]]:
        """The newest full run, and what was caught by their names; a missing log is an empty one."""
        if not self._path.exists():
            return None, {}
        first, *others = map(json.loads, self._path.read_text().splitlines())
        caught = (Caught(**{**line, "tests": tuple(line["tests"])}) for line in others)
        return FullRun(**first), {one.mutant: one for one in caught}

    def begin(self) -> str:
        """Go on with the run that has no end, or begin one: its name."""
        with self._alone():
            run, caught = self.read()
            if run is None or run.ended:
                run = FullRun(now())
                self._write(run, caught)
            return run.begun

    def note(self, mutant: str, caught: Caught | None, digests: Mapping[str, str]) -> None:
        """Write what became of a mutant, None: it was not caught. `digests` are those of all there are now.

        The run ends when each of them was caught in it.
        """
        with self._alone():
            run, lines = self.read()
            assert run is not None, "a full run begins first"
            lines = {name: line for name, line in lines.items() if name in digests and name != mutant}
            if caught is not None:
                lines[mutant] = caught
            done = {name for name, line in lines.items() if _holds(line, run.begun, digests[name])}
            self._write(replace(run, ended=now() if done == set(digests) else None), lines)

    def has(self, mutant: str, run: str, digest: str) -> bool:
        """Whether it was caught in this run already, as it is now."""
        line = self.read()[1].get(mutant)
        return line is not None and _holds(line, run, digest)

    def _write(self, run: FullRun, caught: Mapping[str, Caught]) -> None:
        lines = [asdict(run), *(asdict(caught[name]) for name in sorted(caught))]
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(fresh, self._path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def commit(tree: Path = REPOSITORY) -> str | None:
    """HEAD, in full; None where there is none."""
    with contextlib.suppress(OSError):
        said = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], cwd=tree, capture_output=True, text=True, check=False
        )
        return said.stdout.strip() if said.returncode == 0 else None
    return None


def summary(log: Log) -> str:
    """One row as tests/bench/RESULTS.md has them."""
    run, caught = log.read()
    if run is None:
        return "no full run yet"
    of_it = [line for line in caught.values() if line.run == run.begun]
    commits = ", ".join(sorted({line.commit for line in of_it}))
    ended = f"ended {run.ended}" if run.ended else f"BROKEN OFF, {len(caught) - len(of_it)} lines are older"
    return (
        f"| all mutations: each makes its test fail | `pytest -m long {FOLDER}`, commit {commits} "
        f"| {len(of_it)} caught in {sum(line.seconds for line in of_it) / 60:.1f} min of their own; "
        f"begun {run.begun}, {ended} |"
    )


def _holds(line: Caught, run: str, digest: str) -> bool:
    return (line.run, line.digest) == (run, digest)


if __name__ == "__main__":
    print(summary(Log()))
