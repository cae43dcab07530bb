"""An error of ours that ends a program: its message first, then where in the program's code it came from.

Neighbours: `session.py` has this said in a program that is connected, `failures.py` has the errors,
`dspy/rollouts.py` says where a program crashed. Any other exception is shown as Python shows it. Knows
nothing of what went wrong.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.failures import ClientError

# Where code lies that is not the program's: Python's own, what is installed, ours.
_NOT_THE_USERS = (
    "<frozen",
    *(f"{sysconfig.get_path(it)}{os.sep}" for it in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
)


def own_lines(error: BaseException) -> list[str]:
    """Where it came through the user's own code, the innermost last: `optimize.py:30 in forward`."""
    own = [
        it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith(_NOT_THE_USERS)
    ]
    return [f"{_short(it.filename)}:{it.lineno} in {it.name}" for it in own]


def say_them() -> None:
    """From here on an error of ours that nobody catches says its message first."""
    if not getattr(sys.excepthook, "says_ours", False):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    says_ours = True

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ClientError):
            assert callable(self._before)
            self._before(kind, error, trace)
            return
        cause = error.__cause__
        of_cause = (
            []
            if cause is None
            else [f"  caused by {type(cause).__name__} at {it}" for it in own_lines(cause)]
        )
        lines = [f"{kind.__name__}: {error}", *(f"  at {it}" for it in own_lines(error)), *of_cause]
        sys.stderr.write(sanitized("\n".join(lines)) + "\n")


def _short(filename: str) -> str:
    path = Path(filename)
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return filename
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
