"""Opens and copies files of a folder that may be damaged or tampered with, never through a link.

Neighbours: `checkpoints.py` and `whole_checkpoints.py` read checkpoints with it, `results_copy.py` and
`rollout_texts.py` read the files that come home. A name that points outside its folder and a symbolic link
are refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

_CHUNK_BYTES = 1 << 20


class IncompleteFileError(Exception):
    """A checkpoint or a file is not as it should be; the text names the file."""


def copy_file(
    root: Path, name: str, target: Path, *, link: bool = False, expected: dict[str, Any] | None = None
) -> int:
    """Copy one file of `root`, fsync it; its size. Raises IncompleteFileError, also for wrong bytes."""
    if link and _linked(root, name, target):
        found = digest_and_size(target.parent, target.name)
    else:
        found = _copied(root, name, target)
    if expected is not None:
        check(found, expected, name)
    return found["bytes"]


@contextmanager
def open_checked(root: Path, name: str) -> Iterator[BufferedReader]:
    """Open a regular file below `root`, through no link. Raises IncompleteFileError, FileNotFoundError."""
    check_name(name)
    _refuse_links(root, name)
    # NONBLOCK: a named pipe must not hold us.
    try:
        descriptor = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IncompleteFileError(f"{name} cannot be read ({error.strerror})") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IncompleteFileError(f"{name} is not a file")
        yield file


def check_name(name: str) -> None:
    path = PurePosixPath(name)
    plain = str(path) == name and not path.is_absolute() and ".." not in path.parts
    if not plain or name == "." or "\\" in name or "\0" in name:
        raise IncompleteFileError(f"{name!r} points outside its folder")


def _refuse_links(root: Path, name: str) -> None:
    path = root
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            raise IncompleteFileError(f"{path.name} is a symbolic link")


def check(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    if found != expected:
        raise IncompleteFileError(f"{name} does not match its manifest")


def _linked(root: Path, name: str, target: Path) -> bool:
    """Whether the file system gave the file a second name; the checks on it follow."""
    check_name(name)
    _refuse_links(root, name)
    try:
        os.link(root / name, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except (OSError, NotImplementedError):  # another disk, a file system without links
        return False
    return True


def digest_and_size(root: Path, name: str) -> dict[str, Any]:
    """Its sha256 and size, as a manifest states them."""
    with open_checked(root, name) as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _copied(root: Path, name: str, target: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with open_checked(root, name) as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            writing.write(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}
