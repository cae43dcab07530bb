"""A correctness test earns its name: under the patch that breaks what it guards, it must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, MutantServer, apply, copy_tree, run_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[MutantServer]:
    server = MutantServer()
    yield server
    server.close()


def test_without_a_mutation_the_same_tests_pass_the_same_way(server: MutantServer, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    tests = {test for mutant in Mutant.all() for test in mutant.tests}
    runtime = tuple(sorted(test for test in tests if test.startswith("tests/runtime/")))
    here = tuple(sorted(tests - set(runtime)))
    outcomes = [run(tree, chosen) for run, chosen in ((server.run, runtime), (run_here, here)) if chosen]
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes), outcomes


@pytest.mark.parametrize("mutant", Mutant.all(), ids=lambda mutant: mutant.path.stem)
def test_the_mutation_is_caught(mutant: Mutant, server: MutantServer, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    apply(mutant, tree)
    if mutant.tests[0].startswith("tests/runtime/"):
        outcome = server.run(tree, mutant.tests, mutant.may_share_engine)
    else:
        outcome = run_here(tree, mutant.tests)
    assert outcome.caught, f"{mutant.tests} did not fail under {mutant.path.name}:\n{outcome.output}"
