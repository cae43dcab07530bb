"""Handles Ctrl-C, TERM and HUP: the first one ends the run in order, a Ctrl-C after it leaves the rest to the
guardian. Also raises the alarm of a limit in code that does not check for one.

A TERM or HUP after the first signal is ignored: it comes from `launch down` beside an end that has begun, or
from a terminal that is closed after Ctrl-C. Leaving then would cut off the results that are on their way.

Neighbours: `run.py` runs inside. Knows nothing of runs. Its messages bypass the streams, which the
interrupted code may be writing to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from launcher.base import clock

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "TERM", signal.SIGHUP: "the terminal closed"}
# A wrapper (`uv run`, a shell) may pass on the very signal that the terminal sent us as well.
_SAME_SIGNAL_SECONDS = 0.15
# A timer of nothing would be no timer.
_AT_ONCE_SECONDS = 0.001
# The system's timer stands still while the computer sleeps: the clock is looked at in between.
_POLL_SECONDS = 10.0


class Interrupted(BaseException):
    """The first signal, raised where the run may be interrupted; no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that a shell uses: 130 for INT, 143 for TERM, 129 for HUP."""
        return 128 + self.number


class Signals:
    """While entered, the three signals are ours. `say` must not wait for a lock."""

    def __init__(self, say: Callable[[str], None], leave: Callable[[int], None] = os._exit) -> None:
        self._say = say
        self._leave = leave
        self._may_raise = False
        self._first_at = 0.0
        self._before: dict[int, Any] = {}
        self._rings_at: float | None = None
        self.received: int | None = None
        # The effect of the first signal on the run, in words; `run.py` keeps it true.
        self.consequence = "nothing has started yet"

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`: leave it so
                self._before[number] = signal.signal(number, self._handle)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.alarm(None)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, the first signal is raised as Interrupted; elsewhere it is only noted in `received`."""
        self._may_raise = True
        try:
            if self.received is not None:
                raise Interrupted(self.received)
            yield
        finally:
            self._may_raise = False

    def alarm(self, seconds: float | None) -> None:
        """Raise Interrupted (SIGALRM) after so long, asleep or awake, where it may be raised then; None: not
        any more."""
        self._rings_at = None if seconds is None else clock.boot_seconds() + seconds
        self._wind()

    def _wind(self) -> None:
        left = 0.0
        if self._rings_at is not None:
            left = max(self._rings_at - clock.boot_seconds(), _AT_ONCE_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, min(left, _POLL_SECONDS))

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._rings_at is not None and clock.boot_seconds() < self._rings_at:
            self._wind()
        elif self._may_raise:
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = number
            self._first_at = now
            self._say(f"{_NAMES[signal.Signals(number)]}: {self.consequence}")
            if self._may_raise:
                raise Interrupted(number)
        elif number != signal.SIGINT:
            self._say(f"{_NAMES[signal.Signals(number)]}: {self.consequence}")
        elif now - self._first_at > _SAME_SIGNAL_SECONDS:
            self._say("leaving; the guardian takes everything down in the background")
            self._leave(128 + number)
