"""Tells whether a folder can be written, and how much space its disk has.

Neighbours: `preflight.py`, `hub.py` and `doctor.py` ask. Creates nothing; a folder may not exist yet.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def why_unwritable(folder: Path) -> str | None:
    """The reason nothing can be written in a folder, which may not exist yet; None if it can."""
    try:
        existing = _nearest_existing(folder)
    except OSError as error:
        return error.strerror
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return f"{existing} is on a read-only disk"
    return None


def free_bytes(folder: Path) -> int:
    """The bytes this user may still write on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(_nearest_existing(folder)).free


def format_bytes(size: float) -> str:
    """Bytes for people: "8.0 GB", "312 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size, 0) / 1e6:.0f} MB"


def _nearest_existing(folder: Path) -> Path:
    """The nearest folder above that is there. Raises OSError for a path that cannot be."""
    for path in (folder, *folder.parents):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
