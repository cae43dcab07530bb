"""Writes a file whole or not at all: to a temporary file beside it, then by a rename.

Neighbours: records, results and remembered answers are written by this; `results/` renames whole folders (a
checkpoint, an adapter) into place. Knows nothing of the content.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write(
    path: Path, content: str | bytes, *, durable: bool = False, private: bool = False, locked: bool = False
) -> None:
    """Replace the file at `path` with `content`. Raises OSError; the old file is there then.

    `durable`: on the disk when this returns, so that it survives a power cut. `private`: for this user alone.
    `locked`: the caller's lock keeps other writers of this file away. Then the temporary file has one fixed
    name, and the next writer overwrites the remains of a failed or killed one. Without it, a failed writer
    removes its own.
    """
    whose = "tmp" if locked else f"{os.getpid()}-{threading.get_ident()}.tmp"
    aside = path.with_name(f".{path.name}.{whose}")
    try:
        descriptor = os.open(
            aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if private else 0o666
        )
        with open(descriptor, "wb") as file:
            file.write(_bytes(content))
            file.flush()
            if durable:
                os.fsync(descriptor)
        aside.replace(path)
    except BaseException:  # a Ctrl-C too leaves the temporary file only where the next writer takes it
        if not locked:
            aside.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder of this user's and its parents, and sync their entries to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries (a rename, a new file), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(content: str | bytes) -> bytes:
    """Encode `content`, also a text that was read with `surrogateescape` and is no UTF-8."""
    return content.encode(errors="surrogateescape") if isinstance(content, str) else content
