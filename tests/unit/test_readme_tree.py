"""The lists that are printed: a line for each source file, and every check with its tests and mutations."""

from __future__ import annotations

import pytest

from tests import readme_checks, readme_tree

# All that are proven so far. Whoever proves another one adds it, and none of these may lose its last test.
TESTED = {"C": (*range(1, 57), 58, 59, 60), "G": (*range(1, 32), 34)}
# Those whose tests are shown to fail by a mutation.
MUTATED = {
    "A": (4, 5, 7, 8, 9, 10, 11, 14, 15, 18, 19, 22),
    "B": (1, 2, 3, 7, 8, 9, 10, 12, 13, 14, 15, 16, 18),
    "C": TESTED["C"],
    "G": (6, 13, 14, 17, 18, 19, 20, 21, 23, 24, 28, 34),
    "P": (4,),
    "S": (2,),
}


@pytest.mark.process
def test_every_file_says_what_it_is_for() -> None:
    listed = [line for folder in readme_tree.FOLDERS for line in readme_tree.tree(folder).splitlines()]
    assert len(listed) > 100
    assert not [line for line in listed if line.startswith("  ") and len(line.split()) < 4]


@pytest.mark.process
def test_every_check_has_a_test_and_whichever_had_a_mutation_has_one() -> None:
    found = readme_checks.checks()
    assert not [name for name in _names(TESTED) if name not in found or not found[name].tests]
    assert not [name for name in _names(MUTATED) if name not in found or not found[name].mutations]


def _names(numbers: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{letter}{number:02}" for letter, of in numbers.items() for number in of]
