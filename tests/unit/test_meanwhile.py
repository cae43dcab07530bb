"""What `launch` imports while it waits for its runtime: all that it needs next, and it holds nobody up."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from launcher.run import run
from launcher.run.meanwhile import NEEDED_NEXT

# What `_connect` and `_work` do first, by their own imports; httpx comes with the pulse, its transport later.
_NEXT = ("_connect", "_work", "_watched")
_PROGRAM = """
import sys
import launcher.run.run
from launcher.run.meanwhile import import_meanwhile

before = set(sys.modules)
import_meanwhile().join()
meanwhile = set(sys.modules)
import {names}
import httpx
httpx.Client().close()
print(len(meanwhile - before), sorted(set(sys.modules) - meanwhile))
"""


def test_nothing_is_left_to_import_once_the_runtime_is_ready() -> None:
    tree = ast.parse(Path(run.__file__).read_text())
    named = {
        node.module
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in _NEXT
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    }
    assert named and named <= set(NEEDED_NEXT)
    program = _PROGRAM.format(names=", ".join(sorted(name for name in named if name)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    count, left = done.stdout.split(" ", 1)
    assert int(count) > 100, "else it would not be worth it"
    assert left.strip() == "[]", done.stderr
