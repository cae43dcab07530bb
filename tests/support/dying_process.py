"""A process that dies before any of its changes of a folder, for state machines: its code runs in this one.

Python's audit hook sees each change of the folder's entries before it happens: a file is opened for writing,
made, renamed, removed. An act that a test has planned for it is done then: the process is killed, the disk is
full, or another process comes in between. Once it is killed, each further change raises, so that no cleanup
of the code under test reaches the disk. Bytes written to an open file are not seen: `leave_torn` cuts what a
killed process had not finished.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_CHANGES = frozenset({"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MEMORY = Path("/dev/shm")
_at_work: DyingProcess | None = None
_hooked = False


class Killed(BaseException):
    """The process is dead; no handler for errors may catch it."""


class DyingProcess:
    """One process. Its code runs inside `at_work`."""

    def __init__(self, folder: Path) -> None:
        global _hooked
        self.is_dead = False
        self._folder = str(folder)
        self._changes = 0
        self._planned: dict[int, Callable[[], object]] = {}
        if not _hooked:  # a hook stays for good, and does nothing while no such process is at work
            sys.addaudithook(_before)
            _hooked = True

    def plan(self, count: int, act: Callable[[], object]) -> None:
        """Do it before the process's `count`-th change from now, the first being 1."""
        self._planned[self._changes + count] = act

    def forget_plans(self) -> None:
        """Do nothing more that was planned."""
        self._planned.clear()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Its code runs; `Killed`, which nothing else raises, ends the block and not the test."""
        global _at_work
        before, _at_work = _at_work, self
        try:
            with contextlib.suppress(Killed):
                yield
        finally:
            _at_work = before

    def kill(self) -> NoReturn:
        """An act: its life ends here."""
        self.is_dead = True
        raise Killed

    @staticmethod
    def find_full() -> NoReturn:
        """An act: the disk has no room for this change."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _change(self, path: object, folder_descriptor: object) -> None:
        is_relative = folder_descriptor not in (None, -1)
        if not is_relative and not os.fsdecode(path).startswith(self._folder):  # type: ignore[arg-type]
            return
        global _at_work
        if self.is_dead:
            raise Killed
        self._changes += 1
        if (act := self._planned.pop(self._changes, None)) is not None:
            _at_work = None
            try:
                act()
            finally:
                _at_work = self


def _before(event: str, about: tuple[Any, ...]) -> None:
    if _at_work is None or event not in _CHANGES or isinstance(about[0], int):
        return
    if event == "open":
        if about[2] & _WRITES:
            _at_work._change(about[0], None)
    else:
        _at_work._change(about[0], about[2] if event in ("os.mkdir", "os.rename") else about[1])


def leave_torn(folder: Path, share: float) -> None:
    """Cut the temporary files of a killed process to a share of their bytes: it was writing them.

    They get the name that a process with another pid would have given them.
    """
    own = re.compile(rf"(?<=[.-]){os.getpid()}(?=$|[.-])")
    for path in sorted(folder.rglob("*"), reverse=True):
        parts = path.relative_to(folder).parts
        is_temporary = any(part.startswith(".") and ("tmp" in part or own.search(part)) for part in parts)
        if is_temporary and path.is_file():
            os.truncate(path, int(path.stat().st_size * share))
        if is_temporary and (name := own.sub("1", path.name)) != path.name:
            shutil.rmtree(path.with_name(name), ignore_errors=True)
            path.with_name(name).unlink(missing_ok=True)
            path.rename(path.with_name(name))


def memory_folder() -> Path:
    """A folder of its own in memory, where there is such a place: what is synced there takes no time."""
    return Path(tempfile.mkdtemp(prefix="slip-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
