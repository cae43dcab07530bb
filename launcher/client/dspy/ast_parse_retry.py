"""Retries `ast.parse`, which fails now and then in Python 3.11's threads.

DSPy parses with it a signature that a program makes as it runs, as `dspy.ReAct` does for each turn, and
values of some types. Python 3.11 counts the depth of the tree in one place for all threads. If garbage is
collected in the middle of a parse and another thread goes on, the parse ends with SystemError
(python/cpython#106905). Neither the program nor the policy caused it, and a second try succeeds.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

# Seen with 3.11.2 and 3.11.7, not with 3.12.1. Where a later 3.11 does not fail, nothing is parsed twice.
_FIXED_IN = (3, 12)
_ERROR_TEXT = "AST constructor recursion depth mismatch"
# One of half a million failed, with eight threads that did nothing else: ten in a row will not.
_MAX_ATTEMPTS = 10

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def install() -> None:
    """Have this process's `ast.parse`, which `ast.literal_eval` calls, begin anew where that failed it.

    Nothing is done from Python 3.12 on, or if it was done before.
    """
    if sys.version_info < _FIXED_IN and not hasattr(ast.parse, "__wrapped__"):
        ast.parse = with_retries(ast.parse)


def with_retries(parse: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The same function, called again if another thread interfered. Raises the function's errors."""

    @wraps(parse)
    def parse_with_retries(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return parse(*args, **kwargs)
            except SystemError as error:
                if _ERROR_TEXT not in str(error):
                    raise
        return parse(*args, **kwargs)

    return parse_with_retries
