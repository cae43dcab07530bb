"""The table of checks in tests/README.md: `python -m tests.readme_checks --write` brings it up to date.

A row is a known way to be silently wrong (C) or a promise (G) with the tests that are named after it, and
whether a mutation proves that they can fail.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict

from tests.support import readmes
from tests.support.mutants import Mutant

README = readmes.ROOT / "tests" / "README.md"
_BLOCK = re.compile(r"(<!-- checks -->\n).*?(\n?<!-- end of checks -->)", re.DOTALL)
_NAME = re.compile(r"test_([cg]\d\d)_(\w+)")


def table() -> str:
    """One row for each number, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((readmes.ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := _NAME.fullmatch(node.name)):
                found[match[1].upper()].append(match[2].replace("_", " "))
    mutants = defaultdict(int)
    for mutant in Mutant.all():
        mutants[mutant.name[:3].upper()] += 1
    rows = [
        f"| {number} | {'; '.join(dict.fromkeys(names))} | {mutants[number] or '-'} |"
        for number, names in sorted(found.items(), key=lambda row: (row[0][0] == "C", row[0]))
    ]
    return "\n".join(["| | the tests, by their names | mutations |", "|---|---|---|", *rows])


def updated(text: str) -> str:
    """A README with the real table."""
    return _BLOCK.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == "__main__":
    sys.exit(readmes.bring(updated))
