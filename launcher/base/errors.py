"""The error tree: each error says what failed, why, and a command to paste, and has an exit code.

Neighbours: everything in `launcher` raises these; `main.py` turns them into three lines and an exit code.
Knows nothing of printing, files or processes.

    LaunchError              1   a bug of ours, where nothing below fits
    ├── UsageError           2   wrong or refused on the command line
    ├── PreflightError       3   this computer, or something that was named, is not ready
    │   ├── ConfigError      3   a value in a file or in the environment
    │   └── NotStarted       3   the runtime did not come up: the user's command never ran
    ├── CapacityError        4   no capacity, or a price above the cap
    ├── TeardownUnverified   5   the end of the machine is not proven
    ├── JobFailed            6   the user's command failed, or the runtime under it
    ├── LimitReached         7   deadline or budget
    └── NotPulled            8   results are still on the machine
"""

# ruff: noqa: N818 - these names say what happened
from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Refusals of this computer, whatever program asks: no bug of ours.
_LOCAL_ERRNOS = _DISK_FULL | frozenset(
    {errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES}
    | {errno.EPERM, errno.ETIMEDOUT, errno.ENOLCK, errno.ESTALE}
)  # fmt: skip


class LaunchError(Exception):
    """The failure in one line, its reason in one line, and a hint, best a command to paste.

    A hint for the same run again (`launch --model tiny`) names only the change: before it is shown, the other
    options and the program of the line that failed are put into it. `without`: settings of that line that are
    left out, such as `gpus` and `train.lora.rank`, or its verb.
    """

    exit_code = EXIT_BUG

    def __init__(
        self,
        message: str,
        why: str | None = None,
        hint: str | None = None,
        *,
        without: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.hint = hint
        self.without = tuple(without)

    def to_dict(self) -> dict[str, object]:
        """The error as `--json` shows it."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "why": self.why,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class UsageError(LaunchError):
    """An error on the command line, or a refusal."""

    exit_code = 2


class PreflightError(LaunchError):
    """Something that is needed is missing. It is found before anything starts, if possible."""

    exit_code = 3


class ConfigError(PreflightError):
    """A value or a key in a configuration file or in the environment."""


class NotStarted(PreflightError):
    """The runtime did not come up; `last_lines` is the end of its output."""

    def __init__(
        self, message: str, why: str | None = None, hint: str | None = None, last_lines: Iterable[str] = ()
    ) -> None:
        super().__init__(message, why, hint)
        self.last_lines = list(last_lines)

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {"last_lines": self.last_lines}


class CapacityError(LaunchError):
    """No capacity, or only above the price cap."""

    exit_code = 4


class TeardownUnverified(LaunchError):
    """There is no positive proof that everything is down. Silence is never success."""

    exit_code = 5


class JobFailed(LaunchError):
    """The runtime or the user's command failed; `job_exit_code` is the command's own, if it has one.

    `last_lines`: the end of its output, if it was not shown yet. The very last line is often the reason.
    """

    exit_code = 6

    def __init__(
        self,
        message: str,
        why: str | None = None,
        hint: str | None = None,
        job_exit_code: int | None = None,
        last_lines: Iterable[str] = (),
    ) -> None:
        super().__init__(message, why, hint)
        self.job_exit_code = job_exit_code
        self.last_lines = list(last_lines)

    def to_dict(self) -> dict[str, object]:
        own = {"job_exit_code": self.job_exit_code, "last_lines": self.last_lines}
        return super().to_dict() | own


class LimitReached(LaunchError):
    """Deadline or budget."""

    exit_code = 7


class NotPulled(LaunchError):
    """The results did not come home."""

    exit_code = 8


def as_launch_error(error: Exception, log: Path | None = None) -> LaunchError:
    """Turn any exception into a LaunchError; `log` has the traceback, else --debug shows it."""
    if isinstance(error, LaunchError):
        return error
    look = f"less {log}" if log else "run the same command with --debug to see the traceback"
    if isinstance(error, OSError) and error.errno in _LOCAL_ERRNOS:
        why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        room = f"df -h {log.parent}" if log else "df -h"
        hint = room if error.errno in _DISK_FULL else look
        return PreflightError("an error on this computer stopped launch", why, hint)
    return LaunchError("launch has a bug", f"{type(error).__name__}: {error}", look)


def described(error: BaseException) -> str:
    """An error in one line, with its type unless it is one of ours."""
    if isinstance(error, LaunchError):
        return f"{error.message}: {error.why}" if error.why else error.message
    return f"{type(error).__name__}: {error}"
