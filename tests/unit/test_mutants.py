"""The mutations' own machinery: which run, what is logged of a full run, and what counts as caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import mutant_runs
from tests.support.environment import REPOSITORY
from tests.support.mutant_digest import Digests
from tests.support.mutant_log import Caught, Log, commit, summary
from tests.support.mutant_runs import MutantRuns
from tests.support.mutant_selection import choose
from tests.support.mutants import Change, Copies, Mutant
from tests.support.symbols import Symbols
from tests.support.turns import Turns

FILES = {
    "runtime/__init__.py": "",
    "runtime/sums.py": "def add(a, b):\n    return a + b\n",
    "runtime/other.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "import tests.support.above, tests.support.lanes\n",
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
    "tests/support/lanes.py": "import tests.support.lane\n",
    "tests/support/lane.py": "",
}
MINUS = "return a - b"


def mutant_file(name: str, test: str, line: str) -> str:
    """A mutant of `add`: its last line becomes this one."""
    table = f"[[mutant]]\nid = '{name}'\nsymbol = 'add'\nfind = 'return a + b'\n"
    return f"{table}replace = '{line}'\ntest = '{test}'\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with two mutants of one line; a repository without a commit."""
    root = tmp_path / "tree"
    mutants = {
        "tests/mutations/m1.toml": mutant_file("m1", "tests/runtime/test_sums.py::test_add", MINUS),
        "tests/mutations/m2.toml": mutant_file("m2", "tests/unit/test_sums.py::test_add", MINUS),
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
        ("tests/runtime/test_sums.py", {"m1"}),
        ("tests/runtime/helper.py", {"m1"}),
        ("tests/runtime/server.py", {"m1"}),  # named in a text, for another Python to run
        ("tests/runtime/conftest.py", {"m1"}),
        ("tests/support/deep.py", {"m1"}),  # what that imports
        ("tests/conftest.py", {"m2"}),  # the runtime's pytest does not load it
        ("tests/support/above.py", {"m2"}),
        ("tests/support/__init__.py", {"m1", "m2"}),
        ("tests/support/lanes.py", set()),  # where a test runs in a whole suite
        ("tests/support/lane.py", set()),
        ("runtime/other.py", set()),
        ("runtime/sums.py", set()),  # behind the function that is broken
        ("tests/mutations/m1.toml", set()),
        ("tests/runtime/unrelated.py", set()),
    ],
)
def test_a_mutant_runs_when_a_file_it_is_known_for_has_changed(
    tree: Path, changed: str, selected: set[str]
) -> None:
    seen = digests(tree)
    (tree / changed).write_text(f"{(tree / changed).read_text()}\n# more\n")
    now = choose(Mutant.all(tree), digests(tree), seen, 2)
    assert {mutant.name for mutant in now.changed} == selected
    assert set(now.chosen) == set(now.changed)  # with two mutants, the third turn is nobody's


@pytest.mark.parametrize(
    ("file", "old", "new", "selected"),
    [
        ("runtime/sums.py", "def add(a, b):", "def add(a, b):  # more", {"m1", "m2"}),
        ("tests/mutations/m1.toml", "a - b", "b - a", {"m1"}),
    ],
)
def test_a_mutant_runs_when_what_it_breaks_or_how_has_changed(
    tree: Path, file: str, old: str, new: str, selected: set[str]
) -> None:
    seen = digests(tree)
    (tree / file).write_text((tree / file).read_text().replace(old, new))
    assert choose_names(tree, seen, 2) == selected


def test_a_file_is_moved_without_an_edit_to_its_mutants(tree: Path, tmp_path: Path) -> None:
    seen = digests(tree)
    (tree / "launcher").mkdir()
    (tree / "runtime/sums.py").rename(tree / "launcher/totals.py")
    assert digests(tree) == seen
    copies = Copies(tmp_path / "copies", tree)
    with copies.broken_by(Mutant.all(tree)[0]) as broken:
        assert "return a - b" in (broken / "launcher/totals.py").read_text()


def choose_names(root: Path, seen: dict[str, str], turn: int | None) -> set[str]:
    chosen = choose(Mutant.all(root), digests(root), seen, turn)
    return {mutant.name for mutant in chosen.chosen}


def test_each_unchanged_mutant_has_its_turn_in_one_of_three_runs() -> None:
    mutants = Mutant.all()
    seen = {mutant.name: "as it is" for mutant in mutants}
    thirds = [choose(mutants, seen, seen, turn) for turn in range(3)]
    turns = [mutant.name for third in thirds for mutant in third.turn]
    assert sorted(turns) == sorted(seen)
    assert max(len(third.turn) for third in thirds) <= -(-len(mutants) // 3)
    for third in thirds:
        assert not third.changed and len(third.turn) + len(third.left_out) == len(mutants)
        assert f"{len(third.left_out)} unchanged have theirs" in third.line()


def test_each_run_in_a_checkout_leaves_the_next_turn_to_the_next(tree: Path) -> None:
    Turns(tree).pass_on()
    assert Turns(tree).now() is None  # there is no commit
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tree, check=True)
    seen = []
    for _ in range(4):
        seen.append(Turns(tree).now())
        Turns(tree).pass_on()
    assert set(seen[:3]) == {0, 1, 2} and seen[0] == seen[3] == int(commit(tree) or "", 16) % 3


def test_nothing_is_left_out_without_a_log_or_without_a_commit(tree: Path) -> None:
    assert choose_names(tree, {}, 0) == {"m1", "m2"}
    assert choose_names(tree, digests(tree), None) == {"m1", "m2"}
    assert commit(tree) is None


def test_a_line_of_a_mutant_that_is_gone_is_ignored(tree: Path) -> None:
    seen = digests(tree) | {"gone": "0"}
    assert choose_names(tree, seen, None) == {"m1", "m2"}
    (tree / "tests/mutations/m1.toml").unlink()
    assert choose_names(tree, seen, None) == {"m2"}


@pytest.mark.process
def test_every_mutant_of_this_tree_names_tests_that_are_there_and_applies() -> None:
    known, symbols = Digests(REPOSITORY), Symbols(REPOSITORY)
    for mutant in Mutant.all():
        missing = [name for name in known.files(mutant) if not (REPOSITORY / name).is_file()]
        assert not missing, mutant.name
        for file, text in mutant.broken(symbols).items():
            compile(text, file, "exec")
            assert text != symbols.text(file), mutant.name


@pytest.mark.process
def test_no_mutant_is_caught_for_a_name_that_is_not_there(tmp_path: Path) -> None:
    symbols = Symbols(REPOSITORY)
    for mutant in Mutant.all():
        for number, text in enumerate(mutant.broken(symbols).values()):
            (tmp_path / f"{mutant.name}-{number}.py").write_text(text)
    checks = ("check", "--isolated", "--select", "F821", "--output-format", "concise", tmp_path)
    done = subprocess.run([sys.executable, "-m", "ruff", *checks], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def add(a, b):\n    return sum((a, b))\n", "add has 'return a \\+ b' 0 times"),
        ("def sum(a, b):\n    return a + b\n", "nothing is called add"),
        (2 * "def add(a, b):\n    return a + b\n", "add has 'return a \\+ b' 2 times"),
    ],
)
def test_a_mutant_that_no_longer_applies_is_an_error(tree: Path, tmp_path: Path, text: str, why: str) -> None:
    (tree / "runtime/sums.py").write_text(text)
    copies, mutant = Copies(tmp_path / "copies", tree), Mutant.all(tree)[0]
    with pytest.raises(ValueError, match=f"m1 no longer applies: {why}"), copies.broken_by(mutant):
        pass


def test_a_symbol_is_found_wherever_it_is_nested_and_a_variable_of_a_function_is_none(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    source = (
        "LIMIT = 1\nif LIMIT:\n    MORE: int = 2\nclass A:\n    field = 3\n    @property\n    def b(self):\n"
        "        local = 4\n        async def inner():\n            return local\n        return inner\n"
    )
    (tmp_path / "runtime/a.py").write_text(source)
    symbols = Symbols(tmp_path)
    for name, text in {
        "LIMIT": "1",
        "MORE": "2",
        "A.field": "3",
        "A.b": "@property",
        "A.b.inner": "local",
    }.items():
        assert symbols.source(symbols.find(name, text)).count(text) == 1
    with pytest.raises(LookupError, match=r"nothing is called A\.b\.local"):
        symbols.find("A.b.local", "4")


def test_a_mutant_may_change_several_places_of_a_file(tree: Path) -> None:
    (tree / "runtime/sums.py").write_text("ONE = 1\ndef add(a, b):\n    c = a\n    return c + b\n")
    changes = (
        Change("add", "return c + b", "return c"),
        Change("ONE", "1", "100"),
        Change("add", "c = a", "c = b"),
    )
    mutant = Mutant("m", changes, ("tests/unit/test_sums.py::test_add",))
    expected = "ONE = 100\ndef add(a, b):\n    c = b\n    return c\n"
    assert mutant.broken(Symbols(tree)) == {"runtime/sums.py": expected}


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
    for line, codes in (("return a +", {2, 3, 4}), ("return b + a", {0})):
        outcome = runs.run(replace(mutants[0], changes=(Change("add", "return a + b", line),)))
        assert outcome.exit_code in codes and not (outcome.caught or outcome.failed), outcome.output
    assert [outcome.exit_code for outcome in runs.run_whole(mutants)] == [0, 0]
