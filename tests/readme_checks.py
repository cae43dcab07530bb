"""The checks: `python -m tests.readme_checks` prints each id, its tests, and how many mutations it has.

An id is a promise (G), a known way to be silently wrong (C), a defect that was mended (N, P, R, S), or what
an issue had to show (A, B). Tests and mutations carry it at the head of their names.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.support import readmes
from tests.support.mutants import Mutant

_TEST = re.compile(r"test_([a-z]\d\d)_(\w+)")
_MUTATION = re.compile(r"([a-z]\d\d)(_|$)")


@dataclass(frozen=True)
class Check:
    """What there is under one id: the tests by their names, without it, and how many mutations."""

    tests: tuple[str, ...]
    mutations: int


def checks() -> dict[str, Check]:
    """By id, such as C02, in order."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((readmes.ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (found := _TEST.fullmatch(node.name)):
                tests[found[1].upper()].append(found[2].replace("_", " "))
    named = (_MUTATION.match(mutant.name) for mutant in Mutant.all())
    mutations = Counter(found[1].upper() for found in named if found)
    return {
        name: Check(tuple(dict.fromkeys(tests[name])), mutations[name])
        for name in sorted({*tests, *mutations})
    }


if __name__ == "__main__":
    for name, check in checks().items():
        print(f"{name}  mutations: {check.mutations or '-'}")
        for test in check.tests:
            print(f"     {test}")
