"""A correctness test earns its name: under the mutant that breaks what it guards, it must fail.

    pytest                              mutants that changed since the last full run, a third of the others;
                                        the next run in this checkout takes the next third
    pytest -m long tests/mutations      the full run: all of them; goes on where it was broken off
    python -m tests.support.mutant_log  what that came to

Which are chosen is in `mutant_selection.py`, and said by every run that leaves some out. Only a full run
writes: a line for each mutant, into `full_run.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.environment import REPOSITORY
from tests.support.mutant_digest import Digests
from tests.support.mutant_log import Caught, Log, commit, now
from tests.support.mutant_runs import MutantRuns, Outcome
from tests.support.mutant_selection import select
from tests.support.mutants import Mutant

pytestmark = pytest.mark.slow

SELECTION = select()


def name_of(mutant: Mutant) -> str:
    return mutant.name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MutantRuns]:
    runs = MutantRuns(tmp_path_factory.mktemp("mutants"))
    yield runs
    runs.close()


def check(mutant: Mutant, outcome: Outcome) -> None:
    ended = f"pytest ended with {outcome.exit_code}"
    assert outcome.caught, f"{mutant.tests} did not fail under {mutant.name}, {ended}:\n{outcome.output}"


# ------------------------------------------------------------------ every run


def test_without_a_mutation_the_same_tests_pass_the_same_way(runs: MutantRuns) -> None:
    """Of the changed ones: of the others the full run has seen it."""
    for outcome in runs.run_whole(SELECTION.changed):
        assert outcome.exit_code == 0, f"pytest ended with {outcome.exit_code}:\n{outcome.output}"


@pytest.mark.parametrize("mutant", SELECTION.chosen, ids=name_of)
def test_the_mutation_is_caught(mutant: Mutant, runs: MutantRuns) -> None:
    check(mutant, runs.run(mutant))


# ------------------------------------------------------------------ the full run


class FullRun:
    """A session's part of a full run. What is tested and what is logged are the same copy of the tree."""

    def __init__(self, runs: MutantRuns, chosen: list[Mutant]) -> None:
        digests = Digests(runs.copies.whole)
        self._digests = {mutant.name: digests.of(mutant) for mutant in Mutant.all(runs.copies.whole)}
        self._runs, self._log = runs, Log()
        self._begun = self._log.begin()
        outcomes = runs.run_whole([mutant for mutant in chosen if not self.has(mutant)])
        assert all(outcome.exit_code in (0, 1) for outcome in outcomes), outcomes
        self._failing = {test.partition("[")[0] for outcome in outcomes for test in outcome.failed}

    def has(self, mutant: Mutant) -> bool:
        return self._log.has(mutant.name, self._begun, self._digests[mutant.name])

    def run(self, mutant: Mutant) -> None:
        """Break, check and log; a mutant that was not caught is in the log no more."""
        assert not self._failing & set(mutant.tests), "they fail without a mutation as well"
        begun = time.monotonic()
        outcome = self._runs.run(mutant)
        head = (commit(REPOSITORY) or "none")[:12]
        caught = Caught(
            mutant.name, self._digests[mutant.name], self._begun, now(), head,
            round(time.monotonic() - begun, 1), outcome.failed,
        )  # fmt: skip
        self._log.note(mutant.name, caught if outcome.caught else None, self._digests)
        check(mutant, outcome)


@pytest.fixture(scope="module")
def full_run(runs: MutantRuns, request: pytest.FixtureRequest) -> FullRun:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return FullRun(runs, [it.callspec.params["mutant"] for it in items if "full_run" in it.fixturenames])


@pytest.mark.long
@pytest.mark.parametrize("mutant", Mutant.all(), ids=name_of)
def test_in_the_full_run_the_mutation_is_caught(mutant: Mutant, full_run: FullRun) -> None:
    if full_run.has(mutant):
        pytest.skip("caught in this full run before, as it is now")
    full_run.run(mutant)
