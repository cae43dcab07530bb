"""Mutates the lines that were committed since another commit, and shows which mutants no test noticed.

    uv run --with cosmic-ray python -m tests.mutate_changes main tests/unit/test_client_alarms.py
    uv run --with cosmic-ray python -m tests.mutate_changes HEAD~3 tests/runtime/test_losses.py -k gspo

What stands behind the commit is pytest's. It runs once for each mutant in a worktree of its own, so give it
tests of seconds. A mutant that survives and matters becomes one of `tests/mutations/`. Cosmic Ray makes the
mutants; it is no dependency, and this is not part of the suite.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.environment import REPOSITORY
from tests.support.symbols import PRODUCT

_SECONDS_PER_MUTANT = 300


def main(words: list[str]) -> int:
    """Make the worktree, run Cosmic Ray in it, print its report; 1 where a mutant survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate_changes", description=__doc__)
    parser.add_argument("since", help="a commit or a branch")
    asked, pytest_words = parser.parse_known_args(words)
    files = _said("git", "diff", "--name-only", "--diff-filter=d", asked.since, "HEAD", "--", *PRODUCT)
    files = [file for file in files if file.endswith(".py")]
    if not files:
        parser.error(f"no Python file of {' or '.join(PRODUCT)} has changed since {asked.since}")
    with tempfile.TemporaryDirectory(prefix="mutate-changes-") as folder:
        tree = Path(folder) / "tree"
        _run(REPOSITORY, "git", "worktree", "add", "-q", "--detach", str(tree), "HEAD")
        try:
            return _mutate(tree, asked.since, files, pytest_words)
        finally:
            _run(REPOSITORY, "git", "worktree", "remove", "--force", str(tree))


def _mutate(tree: Path, since: str, files: list[str], pytest_words: list[str]) -> int:
    config, session = tree / ".cosmic-ray.toml", tree / ".cosmic-ray.sqlite"
    config.write_text(_config(since, files, pytest_words))
    _run(tree, *shlex.split(_test_command(pytest_words)))
    _run(tree, "cosmic-ray", "init", config.name, session.name)
    _run(tree, "cr-filter-git", "--config", config.name, session.name)
    _run(tree, "cosmic-ray", "exec", config.name, session.name)
    _run(tree, "cr-report", "--surviving-only", "--show-diff", session.name)
    return subprocess.run(["cr-rate", "--fail-over", "0", session.name], cwd=tree, check=False).returncode


def _config(since: str, files: list[str], pytest_words: list[str]) -> str:
    """JSON's texts and lists are TOML's."""
    return "\n".join(
        (
            "[cosmic-ray]",
            f"module-path = {json.dumps(files)}",
            f"timeout = {_SECONDS_PER_MUTANT}.0",
            "excluded-modules = []",
            f"test-command = {json.dumps(_test_command(pytest_words))}",
            "[cosmic-ray.distributor]",
            'name = "local"',
            "[cosmic-ray.filters.git-filter]",
            f"branch = {json.dumps(since)}",
            "",
        )
    )


def _test_command(pytest_words: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", *pytest_words]
    return shlex.join(command)


def _said(*command: str) -> list[str]:
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
