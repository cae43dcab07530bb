"""The program's output in the run's folder: `program.log`, bounded, without secrets.

Neighbours: `teardown/minder.py` writes it, from the output that `teardown/program_streams.py` passes on to
the terminal; `launch logs RUN --which program` shows it. Of a line that was drawn over and over (a progress
bar) the last state is kept. Knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from launcher.base.log import MAX_BYTES, REDACTOR, rotated

FILE = "program.log"
# A line may be as long as this before its beginning is written.
_MAX_LINE_BYTES = 65536


class ProgramLog:
    """The file at `path`; several streams write to it, each in whole lines. Raises nothing: a full disk costs
    the copy and not the program."""

    def __init__(self, path: Path, most_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0

    def write(self, text: str) -> None:
        """Append whole lines; when the file is full, it becomes the one before, and a new one begins."""
        content = REDACTOR.redact(text).encode(errors="surrogateescape")
        with self._lock, contextlib.suppress(OSError):
            if self._file is None or self._size + len(content) > self._most_bytes:
                self._open_anew()
            assert self._file is not None  # it was opened, or that raised
            self._size += os.write(self._file, content)

    def _open_anew(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._path.replace(rotated(self._path))
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._file).st_size


class LineSplitter:
    """One stream of a program, cut into lines for the log."""

    def __init__(self, log: ProgramLog) -> None:
        self._log = log
        self._rest = ""

    def feed(self, piece: bytes) -> None:
        """The next of its bytes."""
        *whole, rest = (self._rest + piece.decode(errors="surrogateescape")).split("\n")
        if whole:
            self._log.write("".join(f"{_visible_part(line)}\n" for line in whole))
        self._rest = rest if rest.endswith("\r") else _visible_part(rest)
        if len(self._rest) > _MAX_LINE_BYTES:
            self._write_beginning()

    def end(self) -> None:
        """Write the last line, which may lack its newline."""
        if self._rest:
            self._log.write(f"{_visible_part(self._rest)}\n")
        self._rest = ""

    def _write_beginning(self) -> None:
        """Write the beginning of a line, except its end if that may be the beginning of a secret."""
        clean = REDACTOR.redact(self._rest)
        cut = max(0, len(clean) - REDACTOR.max_length)
        self._log.write(clean[:cut])
        self._rest = clean[cut:]


def _visible_part(line: str) -> str:
    """The part of a line that is still visible after it was written over."""
    return line.removesuffix("\r").rpartition("\r")[2]
