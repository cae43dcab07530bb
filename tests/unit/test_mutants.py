"""The mutations' own machinery: which run, what is logged of a full run, and what counts as caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import mutant_runs
from tests.support.environment import REPOSITORY
from tests.support.mutant_digest import Digests
from tests.support.mutant_log import Caught, Log, commit, summary
from tests.support.mutant_runs import MutantRuns
from tests.support.mutant_selection import choose
from tests.support.mutants import Copies, Mutant

FILES = {
    "runtime/__init__.py": "",
    "runtime/sums.py": "def add(a, b):\n    return a + b\n",
    "runtime/other.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "import tests.support.above\n",
    "tests/runtime/conftest.py": "from tests.support import deep\n",
    "tests/runtime/test_sums.py": (
        "from runtime.sums import add\nfrom tests.runtime.helper import TWO\n"
        "def test_add():\n    assert add(TWO, TWO) == 4\n"
        "def test_nothing():\n    pass\n"
    ),
    "tests/runtime/helper.py": "TWO = 2\nSERVER = 'tests.runtime.server'\n",
    "tests/runtime/server.py": "",
    "tests/runtime/unrelated.py": "",
    "tests/unit/test_sums.py": "from runtime.sums import add\ndef test_add():\n    assert add(1, 1) == 2\n",
    "tests/support/__init__.py": "",
    "tests/support/above.py": "",
    "tests/support/deep.py": "",
}
MINUS = "    return a - b"


def patch(test: str, line: str) -> str:
    """A patch of runtime/sums.py: its last line becomes this one."""
    head = f"# test: {test}\ndiff --git a/runtime/sums.py b/runtime/sums.py\n"
    head += "--- a/runtime/sums.py\n+++ b/runtime/sums.py\n"
    return f"{head}@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a + b\n+{line}\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with two mutants of one line; a repository without a commit."""
    root = tmp_path / "tree"
    mutants = {
        "tests/mutations/m1.patch": patch("tests/runtime/test_sums.py::test_add", MINUS),
        "tests/mutations/m2.patch": patch("tests/unit/test_sums.py::test_add", MINUS),
    }
    for name, text in (FILES | mutants).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def digests(root: Path) -> dict[str, str]:
    known = Digests(root)
    return {mutant.name: known.of(mutant) for mutant in Mutant.all(root)}


# ------------------------------------------------------------------ which run


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("runtime/sums.py", {"m1", "m2"}),
        ("tests/mutations/m1.patch", {"m1"}),
        ("tests/runtime/test_sums.py", {"m1"}),
        ("tests/runtime/helper.py", {"m1"}),
        ("tests/runtime/server.py", {"m1"}),  # named in a text, for another Python to run
        ("tests/runtime/conftest.py", {"m1"}),
        ("tests/support/deep.py", {"m1"}),  # what that imports
        ("tests/conftest.py", {"m2"}),  # the runtime's pytest does not load it
        ("tests/support/above.py", {"m2"}),
        ("tests/support/__init__.py", {"m1", "m2"}),
        ("runtime/other.py", set()),
        ("tests/runtime/unrelated.py", set()),
    ],
)
def test_a_mutant_runs_when_a_file_it_is_known_for_has_changed(
    tree: Path, changed: str, selected: set[str]
) -> None:
    seen = digests(tree)
    (tree / changed).write_text(f"{(tree / changed).read_text()}\n# more\n")
    now = choose(Mutant.all(tree), digests(tree), seen, "2")
    assert {mutant.name for mutant in now.changed} == selected
    assert set(now.chosen) == set(now.changed)  # with two mutants, this commit is nobody's turn


def choose_names(root: Path, seen: dict[str, str], commit: str | None) -> set[str]:
    chosen = choose(Mutant.all(root), digests(root), seen, commit)
    return {mutant.name for mutant in chosen.chosen}


def test_each_unchanged_mutant_has_its_turn_in_one_of_three_commits() -> None:
    mutants = Mutant.all()
    seen = {mutant.name: "as it is" for mutant in mutants}
    thirds = [choose(mutants, seen, seen, commit) for commit in ("a0", "a1", "a2")]
    turns = [mutant.name for third in thirds for mutant in third.turn]
    assert sorted(turns) == sorted(seen)
    assert max(len(third.turn) for third in thirds) <= -(-len(mutants) // 3)
    for third in thirds:
        assert not third.changed and len(third.turn) + len(third.left_out) == len(mutants)
        assert all(mutant.name in third.line().split() for mutant in third.left_out)


def test_nothing_is_left_out_without_a_log_or_without_a_commit(tree: Path) -> None:
    assert choose_names(tree, {}, "a0") == {"m1", "m2"}
    assert choose_names(tree, digests(tree), None) == {"m1", "m2"}
    assert commit(tree) is None


def test_a_line_of_a_patch_that_is_gone_is_ignored(tree: Path) -> None:
    seen = digests(tree) | {"gone": "0"}
    assert choose_names(tree, seen, None) == {"m1", "m2"}
    (tree / "tests/mutations/m1.patch").unlink()
    assert choose_names(tree, seen, None) == {"m2"}


def test_every_mutant_of_this_tree_names_files_and_tests_that_are_there_and_applies() -> None:
    known = Digests(REPOSITORY)
    for mutant in Mutant.all():
        missing = [name for name in known.files(mutant) if not (REPOSITORY / name).is_file()]
        assert mutant.files and not missing, mutant.name
    unfit = [mutant.name for mutant in Mutant.all() if not _applies(mutant)]
    assert unfit == []


def _applies(mutant: Mutant) -> bool:
    checked = subprocess.run(
        ["git", "apply", "--check", "-p1", mutant.path], cwd=REPOSITORY, capture_output=True
    )
    return checked.returncode == 0


# ------------------------------------------------------------------ the log


def caught(name: str, run: str, digest: str = "now") -> Caught:
    return Caught(name, digest, run, "2026-01-01T00:00:00Z", "abc", 1.5, (f"tests/x.py::{name}",))


def test_a_full_run_that_was_broken_off_goes_on_and_ends_when_all_were_caught(tmp_path: Path) -> None:
    log, all_of_them = Log(tmp_path / "log.jsonl"), {"m1": "now", "m2": "now"}
    run = log.begin()
    log.note("m1", caught("m1", run), all_of_them)
    assert log.begin() == run and log.has("m1", run, "now")
    assert not log.has("m1", run, "changed since") and not log.has("m2", run, "now")
    log.note("m2", caught("m2", run), all_of_them)
    (ended, lines) = log.read()
    assert ended and ended.ended and sorted(lines) == ["m1", "m2"]
    assert "| 2 caught in 0.1 min of their own" in summary(log)


def test_a_new_full_run_has_the_old_lines_until_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "log.jsonl")
    monkeypatch.setattr("tests.support.mutant_log.now", iter(["one", "end of one", "two"]).__next__)
    log.note("m1", caught("m1", log.begin()), {"m1": "now"})
    run = log.begin()
    assert run == "two" and not log.has("m1", run, "now")
    assert log.read()[1]["m1"].run == "one"
    assert "BROKEN OFF, 1 lines are older" in summary(log)


def test_a_mutant_that_was_not_caught_and_one_that_is_gone_are_in_the_log_no_more(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    run = log.begin()
    for name in ("m1", "m2", "gone"):
        log.note(name, caught(name, run), {"m1": "now", "m2": "now", "gone": "now", "m3": "now"})
    log.note("m2", None, {"m1": "now", "m2": "now", "m3": "now"})
    assert sorted(log.read()[1]) == ["m1"]
    assert [json.loads(line).get("mutant") for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        None, "m1"
    ]  # fmt: skip


# ------------------------------------------------------------------ what counts as caught


def test_a_copy_is_broken_and_mended_and_its_byte_code_told_apart(tree: Path, tmp_path: Path) -> None:
    copies, (mutant, _) = Copies(tmp_path / "copies", tree), Mutant.all(tree)
    assert not (copies.broken / ".git").exists()

    def value() -> str:
        program = [sys.executable, "-c", "from runtime.sums import add; print(add(1, 1))"]
        environ = {"PYTHONPATH": str(copies.broken)}
        done = subprocess.run(program, env=environ, cwd=copies.broken, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr

    for _ in range(2):
        assert value() == "2"
        with copies.broken_by(mutant) as broken:
            assert (broken, value()) == (copies.broken, "0")
    assert value() == "2"
    assert (tree / "runtime/sums.py").read_text() == FILES["runtime/sums.py"]


def test_a_patch_that_no_longer_applies_is_an_error(tree: Path, tmp_path: Path) -> None:
    (tree / "runtime/sums.py").write_text("def add(a, b):\n    return sum((a, b))\n")
    copies, mutant = Copies(tmp_path / "copies", tree), Mutant.all(tree)[0]
    with pytest.raises(ValueError, match=r"m1\.patch no longer applies"), copies.broken_by(mutant):
        pass


@pytest.fixture
def runs(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MutantRuns]:
    """Of the small tree, its tests all run by this Python; the server's own code is put beside them."""
    server = "tests/support/mutant_server.py"
    (tree / server).write_text((REPOSITORY / server).read_text())
    (tree / "runtime/engine").mkdir()
    (tree / "runtime/engine/server.py").touch()
    monkeypatch.setattr(mutant_runs, "runtime_python", lambda: Path(sys.executable))
    monkeypatch.setattr(mutant_runs, "_RUNTIMES_MODULES", ())
    monkeypatch.setattr(mutant_runs, "_MODULES", ())
    runs = MutantRuns(tmp_path / "copies", tree)
    yield runs
    runs.close()


@pytest.mark.slow
def test_only_a_test_that_ran_and_failed_has_caught_a_mutant(tree: Path, runs: MutantRuns) -> None:
    mutants = Mutant.all(tree)
    assert [outcome.exit_code for outcome in runs.run_whole(mutants)] == [0, 0]
    for mutant in mutants:
        outcome = runs.run(mutant)
        assert (outcome.caught, outcome.failed) == (True, mutant.tests), outcome.output
    for line, codes in (("    return a +", {2, 3, 4}), ("    return b + a", {0})):
        patch_file = runs.copies.whole / "tests/mutations" / mutants[0].path.name
        patch_file.write_text(patch(mutants[0].tests[0], line))
        outcome = runs.run(mutants[0])
        assert outcome.exit_code in codes and not (outcome.caught or outcome.failed), outcome.output
    assert [outcome.exit_code for outcome in runs.run_whole(mutants)] == [0, 0]
