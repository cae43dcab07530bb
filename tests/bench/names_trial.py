"""Ten files of each half by chance, with their names alone, for the trial "explain from their names alone".

    python -m tests.bench.names_trial              prints file, class and function names
    python -m tests.bench.names_trial --seed 7     another draw

The default seed was committed before the trial, and so nobody chose the files. Who judges reads the files.
"""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path

from tests.support import readmes

SEED = 20261127
FILES_OF_EACH_HALF = 10
HALVES = ("launcher", "runtime")


def draw(half: str, seed: int) -> list[Path]:
    """The half's files that were drawn, in name order; a folder's `__init__` has no job of its own."""
    files = [Path(name) for name in readmes.listed(f"{half}/*.py")]
    named = sorted(path for path in files if path.stem != "__init__")
    return sorted(random.Random(f"{seed} {half}").sample(named, FILES_OF_EACH_HALF))


def names(path: Path) -> list[str]:
    """What a file defines, in its order; the methods of a class a step further in."""
    lines: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = (it.name for it in node.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef))
            lines += [f"  class {node.name}", *(f"    {name}" for name in methods)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines.append(f"  {node.name}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.bench.names_trial")
    parser.add_argument("--seed", type=int, default=SEED)
    seed = parser.parse_args().seed
    for half in HALVES:
        for path in draw(half, seed):
            print("\n".join([str(path.relative_to(readmes.ROOT)), *names(path)]), end="\n\n")
