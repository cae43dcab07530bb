"""Tests that take turns: each of the table's lines is some, none has two turns, three whole runs take all."""

from __future__ import annotations

import ast
import functools

from tests.support.environment import REPOSITORY
from tests.support.turns import TURNS, is_left_out


@functools.cache
def ids() -> list[str]:
    """Of all test functions, as the whole suite has them."""
    found = []
    for path in sorted((REPOSITORY / "tests").glob("*/test_*.py")):
        functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
        file = path.relative_to(REPOSITORY)
        found += [f"{file}::{node.name}" for node in functions if node.name.startswith("test_")]
    return found


def test_each_line_of_the_turns_is_tests_that_no_other_line_has() -> None:
    lines = [start for starts in TURNS for start in starts]
    for test in ids():
        assert sum(test.startswith(line) for line in lines) <= 1, test
    for line in lines:
        assert any(test.startswith(line) for test in ids()), line


def test_three_runs_take_every_test_and_each_takes_most() -> None:
    left_out = [{test for test in ids() if is_left_out(test, turn)} for turn in range(len(TURNS))]
    assert not set.intersection(*left_out)
    assert all(0 < len(some) < len(ids()) / 20 for some in left_out)
    assert not any(is_left_out(test, None) for test in ids())
