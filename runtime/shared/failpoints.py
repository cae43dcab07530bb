"""Named instants at which a test kills, breaks or freezes the process that passes them. Inert otherwise.

    SLIPWAY_FAILPOINT=trainer.committed:kill9                   the first passing of that instant
    SLIPWAY_FAILPOINT=engine.streaming@5:stop,gateway.given:raise   the fifth; several instants
    SLIPWAY_FAILPOINT=file:/folder/name                         the same text out of a file

The file is looked at on each passing, so that a running process can be armed; it is removed just before its
instant acts, so that it acts once however many processes pass it, and its absence shows that it did.

Actions: `kill9` `term` `int` `hup` `segv` `stop` (signals to the process itself), `raise` (FailpointError),
`full` (the OSError of a full disk), `hang` (the thread sleeps for good).
Neighbours: the runtime's processes call `failpoint("trainer.committed")`; the launcher reads LAUNCH_FAILPOINT
with a `Failpoints` of its own. Standard library only; knows nothing of the passing code.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

VARIABLE = "SLIPWAY_FAILPOINT"
_FILE = "file:"
_SIGNALS = {
    "kill9": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "segv": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
}
ACTIONS = (*_SIGNALS, "raise", "full", "hang")


class FailpointError(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(frozen=True)
class Failpoint:
    """Act at the `count`-th passing of `name`."""

    name: str
    action: str
    count: int = 1


def parse(text: str) -> tuple[Failpoint, ...]:
    """`name[@count]:action`, separated by commas. Raises ValueError for anything else."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> Failpoint:
    place, _, action = text.rpartition(":")
    name, _, count = place.partition("@")
    if not name or action not in ACTIONS or not (count or "1").isdigit():
        raise ValueError(f"{text!r} is no failpoint: NAME[@COUNT]:{'|'.join(ACTIONS)}")
    return Failpoint(name, action, int(count or 1))


class Failpoints:
    """The armed instants of one process: `text` as in the variable, "" for none."""

    def __init__(self, text: str) -> None:
        self._file = Path(text.removeprefix(_FILE)) if text.startswith(_FILE) else None
        self._text = ""
        self._points: tuple[Failpoint, ...] = ()
        self._passed: Counter[str] = Counter()
        if self._file is None:
            self._arm(text)

    @property
    def armed(self) -> bool:
        """Whether any instant could ever act; if not, a hot path need not be wrapped at all."""
        return bool(self._points) or self._file is not None

    def reached(self, name: str) -> None:
        """Act if this is the instant."""
        if not self.armed:
            return
        if self._file is not None:
            self._arm(_read(self._file))
        self._passed[name] += 1
        for point in self._points:
            if point.name == name and point.count == self._passed[name] and self._take():
                _act(point)

    def _arm(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._points = parse(text)
            self._passed.clear()

    def _take(self) -> bool:
        """Whether this process may act: of several processes, the one that removes the file."""
        if self._file is None:
            return True
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        return True


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _act(point: Failpoint) -> None:
    if point.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[point.action])
    elif point.action == "raise":
        raise FailpointError(f"failpoint {point.name}")
    elif point.action == "full":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (failpoint {point.name})")
    else:
        _hang()


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


_ours = Failpoints(os.environ.get(VARIABLE, ""))


def armed() -> bool:
    """Whether the runtime's variable is set in this process."""
    return _ours.armed


def failpoint(name: str) -> None:
    """An instant of the runtime's own processes."""
    if _ours.armed:
        _ours.reached(name)
