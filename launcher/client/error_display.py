"""Shows an error of ours that ends a program: its message first, then its place in the program's code.

Neighbours: `session.py` installs it in a program that is connected, `failures.py` has the errors,
`dspy/rollouts.py` shows a crash's place. Any other exception is shown as Python shows it. Knows nothing of
the errors' reasons.
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

# The places of code that is not the program's: Python's own, installed packages, ours.
_NOT_USER_CODE = (
    "<frozen",
    *(f"{sysconfig.get_path(it)}{os.sep}" for it in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
)


def user_code_lines(error: BaseException) -> list[str]:
    """Where it came through the user's own code, the innermost last: `optimize.py:30 in forward`."""
    frames = [
        it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith(_NOT_USER_CODE)
    ]
    return [f"{_relative_path(it.filename)}:{it.lineno} in {it.name}" for it in frames]


def install_excepthook() -> None:
    """From here on an uncaught error of ours shows its message first."""
    if not getattr(sys.excepthook, "says_ours", False):
        sys.excepthook = _ExceptHook(sys.excepthook)


class _ExceptHook:
    says_ours = True

    def __init__(self, before: object) -> None:
        self._previous = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ClientError):
            assert callable(self._previous)
            self._previous(kind, error, trace)
            return
        cause = error.__cause__
        of_cause = (
            []
            if cause is None
            else [f"  caused by {type(cause).__name__} at {it}" for it in user_code_lines(cause)]
        )
        lines = [f"{kind.__name__}: {error}", *(f"  at {it}" for it in user_code_lines(error)), *of_cause]
        sys.stderr.write(sanitized("\n".join(lines)) + "\n")


def _relative_path(filename: str) -> str:
    path = Path(filename)
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return filename
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
