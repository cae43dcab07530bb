"""`ast.parse` in threads, where Python up to 3.11.7 fails one now and then.

DSPy parses with it a signature that a program makes as it runs, as `dspy.ReAct` does for each turn, and
values of some types. Those Pythons count the depth of the tree in one place for all threads: where garbage is
collected in the middle of one and another thread goes on, it ends with SystemError (python/cpython#106905,
mended in 3.11.8). Neither the program nor the policy did it, and the same once more does well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_MENDED_IN = (3, 11, 8)
_WORDS = "AST constructor recursion depth mismatch"
# It is one of some 100,000 with eight threads that do nothing else.
_TRIES = 10

_Asked = ParamSpec("_Asked")
_Tree = TypeVar("_Tree")


def mend() -> None:
    """Have this process's `ast.parse`, which `ast.literal_eval` calls, begin anew where that failed it.

    Nothing is done where Python is newer, or it was done before.
    """
    if sys.version_info < _MENDED_IN and not hasattr(ast.parse, "__wrapped__"):
        ast.parse = anew(ast.parse)


def anew(parse: Callable[_Asked, _Tree]) -> Callable[_Asked, _Tree]:
    """The same function, asked once more where another thread came between. Raises what it raises."""

    @wraps(parse)
    def patient(*args: _Asked.args, **kwargs: _Asked.kwargs) -> _Tree:
        for _ in range(_TRIES - 1):
            try:
                return parse(*args, **kwargs)
            except SystemError as error:
                if _WORDS not in str(error):
                    raise
        return parse(*args, **kwargs)

    return patient
