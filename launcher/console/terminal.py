"""One line of a terminal that is drawn again and again while other text passes above it.

Neighbours: `output.py` draws, `teardown/minder.py` cleans up after a killed launcher. Only here are escape
sequences that move the cursor. Knows nothing of runs or of the line's content.

Inline, the line stands below our last output, so no other program may be writing. Pinned, it stands on the
terminal's last row outside the scrolling region, so another program that shares the terminal scrolls above
it. All of one drawing is one write, so nothing gets between its parts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TextIO

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CLEAR_LINE = "\x1b[2K"
_ALL_ROWS = "\x1b[r"
# A smaller terminal shows the program only.
_MIN_ROWS, _MIN_COLUMNS = 6, 20
_DEFAULT_SIZE = os.terminal_size((80, 24))


def reset_rows(descriptor: int) -> None:
    """Give all rows back to the terminal, after the owner of a pinned line has died."""
    with contextlib.suppress(OSError):
        if os.isatty(descriptor):
            os.write(descriptor, f"{_SAVE}{_ALL_ROWS}{_RESTORE}".encode())


class StatusLine:
    """Draws on `stream`, which must be a terminal. Safe to call from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._text = ""
        self._style = ""
        self._inline = False
        self._pinned = False
        self._rows = 0

    def draw(self, text: str, style: str = "") -> None:
        """Show `text`, cut to the terminal's width, instead of the line before; `style`: an SGR sequence."""
        with self._lock:
            self._text, self._style = text, style
            if self._pinned:
                self._write(self._pinned_text())
            else:
                self._inline = True
                self._write(f"\r{_CLEAR_LINE}{self._shown()}")

    def write(self, line: str) -> None:
        """A lasting line, above the status line if that is inline."""
        with self._lock:
            if self._inline:
                self._write(f"\r{_CLEAR_LINE}{line}\n{self._shown()}")
            else:
                self._write(f"{line}\n")

    def clear(self) -> None:
        """Remove the status line; the cursor is at the start of a row."""
        with self._lock:
            if self._pinned:
                self._write(self.clear_sequence())
                self._pinned = False
            elif self._inline:
                self._write(f"\r{_CLEAR_LINE}")
            self._inline = False
            self._text = ""

    def pin(self) -> None:
        """Give the last row to the status line from now on; a small terminal keeps all its rows."""
        with self._lock:
            self.clear()
            columns, rows = self._size()
            if rows < _MIN_ROWS or columns < _MIN_COLUMNS:
                return
            self._pinned = True
            # The newline makes sure that the cursor is not on the row that leaves the region.
            self._write(f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A")
            self._rows = rows

    def clear_sequence(self) -> str:
        """The bytes that remove the status line and move to the start of a row; also for a signal handler,
        which cannot wait for the lock."""
        if self._inline:
            return f"\r{_CLEAR_LINE}"
        # As many blanks as a row less one: the cursor gets to a new row unless it is at a row's start.
        new_row = f"{' ' * (self._size().columns - 1)}\r{_CLEAR_LINE}"
        if not self._pinned:
            return new_row
        return f"{_SAVE}{_ALL_ROWS}\x1b[{self._rows};1H{_CLEAR_LINE}{_RESTORE}{new_row}"

    def _pinned_text(self) -> str:
        _, rows = self._size()
        # Again each time: the terminal may have been resized, or a program may have reset it.
        self._rows = rows
        return f"{_SAVE}\x1b[1;{rows - 1}r\x1b[{rows};1H{_CLEAR_LINE}{self._shown()}{_RESTORE}"

    def _shown(self) -> str:
        columns, _ = self._size()
        whole = len(self._text) < columns
        text = self._text if whole else _cut(self._text, max(0, columns - 2))
        return f"{self._style}{text}\x1b[0m" if self._style else text

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return _DEFAULT_SIZE
        return size if size.columns and size.lines else _DEFAULT_SIZE  # a container may report 0 × 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._stream.write(text)
            self._stream.flush()


def _cut(text: str, width: int) -> str:
    """The words that fit, with a mark that more would follow."""
    words = text[: width + 1].rpartition(" ")[0].rstrip(" ·")
    return f"{words} …" if words and len(words) + 2 <= width + 1 else f"{text[:width]}…"
