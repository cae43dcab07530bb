"""Copies append-only JSONL files such as `metrics.jsonl`: new lines are appended to the local copy.

Neighbours: `results_copy.py` copies the journals of a local run by it, `backends/ssh/results_download.py`
those of a rented machine. Whole lines only; a kill may leave half a line at the end, which the next addition
removes. If the local copy is not a prefix of the remote file (the machine began again at an earlier step),
the whole file replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from launcher.base import atomic

# The trainer's: a line for each committed step.
METRICS = "metrics.jsonl"
_CHUNK_BYTES = 1 << 20


def known_prefix(path: Path) -> tuple[int, str]:
    """The size of the whole lines in the local copy, and their sha256."""
    try:
        with path.open("rb") as file:
            count = _whole_lines(file)
            file.seek(0)
            return count, _digest(file, count)
    except FileNotFoundError:
        return 0, hashlib.sha256().hexdigest()


def extend(path: Path, at: int, lines: bytes) -> int:
    """Write `lines` after the first `at` bytes of the local copy; at 0 they replace it. Returns the bytes
    written. Raises OSError; the old content is there then."""
    if at == 0:
        return _replace(path, lines)
    with path.open("r+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END) > at:
            file.truncate(at)
            file.seek(at)
        if not lines:
            return 0
        try:
            _write(file, lines)
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(at)
            raise
    return len(lines)


def append_new_lines(there: BinaryIO, home: Path) -> int:
    """Append the new whole lines of an open file to the local copy; returns the bytes written. Raises
    OSError."""
    count, sha256 = known_prefix(home)
    same = count > 0 and _digest(there, count) == sha256
    there.seek(count if same else 0)
    more = there.read()
    return extend(home, count if same else 0, more[: more.rfind(b"\n") + 1])


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Its objects, in their order; a line that is cut short or damaged is passed over."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        yield from _objects(file)


def read_newest_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of its last MiB, the newest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _CHUNK_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from _objects(reversed(lines))


def _objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    for text in lines:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _replace(path: Path, lines: bytes) -> int:
    if path.exists() and path.read_bytes() == lines:
        return 0
    atomic.write(path, lines, locked=True)
    return len(lines)


def _write(file: BinaryIO, lines: bytes) -> None:
    view = memoryview(lines)
    while view:
        view = view[file.write(view) :]


def _whole_lines(file: BinaryIO) -> int:
    """Where its last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _CHUNK_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _digest(file: BinaryIO, count: int) -> str:
    """The digest of its next bytes, or of as many as there are."""
    digest = hashlib.sha256()
    while count and (chunk := file.read(min(count, _CHUNK_BYTES))):
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()
