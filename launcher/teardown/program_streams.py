"""Forwards the program's output to the terminal as it is printed, and keeps a copy.

A stream that is a terminal stays one for the program: a terminal of its own (a pty) of the same size and
settings, so colours and progress bars are as they were. A pipe or a file is a pipe for it. Standard input is
not touched: Ctrl-C and typed keys go straight to the program.
Neighbours: `minder.py` opens these for the command, `program_log.py` keeps. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import termios
import threading
from collections.abc import Callable

from launcher.base import descriptor_polling
from launcher.teardown.program_log import LineSplitter, ProgramLog

_BYTES = 65536
_OUTPUT_FLAGS = 1  # of the list that tcgetattr gives


class ProgramStreams:
    """Our standard output and error, handed on. `for_command` are the two descriptors for the command."""

    def __init__(self, log: ProgramLog) -> None:
        self._log = log
        # By their target: one way for both streams to it keeps the output in its order.
        self._ways: dict[tuple[int, int, int], _ForwardedStream] = {}
        self.for_command: tuple[int | None, int | None] = (self._way(1), self._way(2))
        self.ended, self._ending = os.pipe()
        self._left = len(self._ways)
        self._lock = threading.Lock()
        self._quiet = False

    def begin(self) -> None:
        """Begin to forward, until the end; call it once the command has the streams, because only the command
        may hold their ends open."""
        if not self._ways:
            os.close(self._ending)
        for way in self._ways.values():
            way.begin(self._log, self._over)

    def done(self) -> bool:
        """Whether nothing was in transit at two looks in a row."""
        if descriptor_polling.wait_readable([self.ended], 0):
            return True
        was, self._quiet = self._quiet, all(way.is_idle() for way in self._ways.values())
        return was and self._quiet

    def resize(self) -> None:
        """The terminal has another size."""
        for way in self._ways.values():
            way.resize()

    def _way(self, descriptor: int) -> int | None:
        """The descriptor that the command writes to instead; None for the stream itself, if it is closed."""
        try:
            found = os.fstat(descriptor)
            known = (found.st_dev, found.st_ino, found.st_rdev)
            if known not in self._ways:
                self._ways[known] = _ForwardedStream(descriptor, stat.S_ISCHR(found.st_mode))
        except OSError:
            return None
        return self._ways[known].writing

    def _over(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                os.close(self._ending)  # `ended` is at its end


class _ForwardedStream:
    """From the command to one of our streams."""

    def __init__(self, target: int, may_be_terminal: bool) -> None:
        self._target = target
        self._busy = False
        self._over = False
        self._terminal = may_be_terminal and os.isatty(target)
        if self._terminal:
            self._reading, self.writing = os.openpty()
            self._copy_terminal_settings()
        else:
            self._reading, self.writing = os.pipe()

    def begin(self, log: ProgramLog, over: Callable[[], None]) -> None:
        os.close(self.writing)
        threading.Thread(target=self._forward, args=(LineSplitter(log), over), daemon=True).start()

    def resize(self) -> None:
        if self._terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._reading, termios.TIOCSWINSZ, size)

    def is_idle(self) -> bool:
        """Whether none of its output is in transit."""
        if self._over:
            return True
        try:
            return not self._busy and not descriptor_polling.wait_readable([self._reading], 0)
        except (OSError, ValueError):  # it ends at this moment
            return True

    def _copy_terminal_settings(self) -> None:
        """The settings of the terminal it stands for, which makes line ends of its own."""
        with contextlib.suppress(OSError, termios.error):
            settings = termios.tcgetattr(self._target)
            settings[_OUTPUT_FLAGS] &= ~termios.OPOST
            termios.tcsetattr(self.writing, termios.TCSANOW, settings)
        self.resize()

    def _forward(self, lines: LineSplitter, over: Callable[[], None]) -> None:
        """Forward until no writer is left, or no reader; then the command gets the same signal as it would
        without us."""
        try:
            while piece := self._read():
                lines.feed(piece)
                self._write(piece)
                self._busy = False
        except OSError:
            pass  # its reader is gone
        finally:
            self._over = True
            os.close(self._reading)
            lines.end()
            over()

    def _read(self) -> bytes:
        descriptor_polling.wait_readable([self._reading])
        self._busy = True
        try:
            return os.read(self._reading, _BYTES)
        except OSError:  # a terminal that no process holds open (Linux)
            return b""

    def _write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:  # another program that shares the terminal set it so
                descriptor_polling.wait_writable(self._target)
