"""Reads single keys from the terminal as they are pressed, without an echo.

Neighbours: `consent.py` asks for whole answers. Knows nothing of the keys' meaning.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import time
from types import TracebackType
from typing import Any, Self

from launcher.base import descriptor_polling

_INPUT, _LOCAL = 0, 3  # of the list that tcgetattr gives


class RawKeyboard:
    """While entered, the terminal of our input gives keys one by one; Ctrl-C stays Ctrl-C."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        """Discard keys that were typed before: they answer no question of ours."""
        try:
            self._enter_raw_mode()
        except BaseException:  # a signal: nothing else gives the terminal back
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def read_key(self, seconds: float) -> str | None:
        """The next key within so long, None without one; empty if none can come any more."""
        if in_background(self._descriptor):
            time.sleep(seconds)
            return None
        if not descriptor_polling.wait_readable([self._descriptor], seconds):
            return None
        try:
            return os.read(self._descriptor, 1).decode(errors="replace")
        except OSError:
            return ""

    def _enter_raw_mode(self) -> None:
        with contextlib.suppress(termios.error):
            self._before = termios.tcgetattr(self._descriptor)
            changed = termios.tcgetattr(self._descriptor)
            changed[_LOCAL] &= ~(termios.ICANON | termios.ECHO)
            changed[_LOCAL] |= termios.ISIG
            changed[_INPUT] |= termios.ICRNL
            self._set(termios.TCSAFLUSH, changed)

    def _restore(self) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal was closed
                self._set(termios.TCSADRAIN, self._before)

    def _set(self, when: int, attributes: list[Any]) -> None:
        """Set attributes also from the background, where a terminal would stop us."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
        try:
            termios.tcsetattr(self._descriptor, when, attributes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def in_background(descriptor: int) -> bool:
    """Whether this terminal belongs to another job of our shell now."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # it is not our session's
        return False
