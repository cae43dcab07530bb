"""Small JSON files that several processes of the runtime read while one writes: whole or absent, never half.

Neighbours: the keeper, the supervisor and the gateway write their state with it. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Replace `path` with `value` as JSON in one step; `durable` also survives a power cut (fsync)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            json.dump(value, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk wants its space back
        raise
    if durable:
        fsync(path.parent)


def read_json(path: Path) -> Any | None:
    """The file's value; None when there is no such file. Raises ValueError when it is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def append_line(path: Path, value: Any, *, durable: bool = False) -> None:
    """Append one JSON object as a line, in one write; `durable` also survives a power cut (fsync)."""
    line = json.dumps(value) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_lines(path: Path, values: Iterable[Any]) -> None:
    """Replace a file of lines by these, whole or not at all. Nothing torn is left, which the next line would
    be a part of. A full disk leaves the present content, which is readable."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text("".join(json.dumps(value) + "\n" for value in values))
        partial.replace(path)


def fsync(path: Path) -> None:
    """Make a file, or a folder's entries (a rename, a new file), survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
