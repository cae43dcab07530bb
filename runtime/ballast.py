"""Room on a rented machine's disk that belongs to the machine's own end.

A full disk takes no write: the timer could not be reset, the end could not be recorded, and no file could be
staged for the copy home. So the keeper lays down small files and removes one whenever such a write is
refused. They are several, because whatever filled the disk takes the freed room as well; the last one is for
the end. Neighbours: `keeper.py` has them, `autodown.py` asks for room; `remote_staging.py` of the launcher,
which is sent to the machine alone, removes some by itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

FOLDER = "ballast"
_PIECES = 8
_PIECE_BYTES = 4 << 20
# Pieces are laid down only where the free room is this many times all of them.
_FREE_PARTS = 2
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Ballast:
    """The files in `state_dir/ballast`. Without `fill` there are none, and no write is helped."""

    def __init__(self, state_dir: Path, pieces: int = _PIECES, piece_bytes: int = _PIECE_BYTES) -> None:
        self._folder = state_dir / FOLDER
        self._pieces = pieces
        self._piece_bytes = piece_bytes

    def fill(self) -> None:
        """Lay down the pieces that are missing, if the disk has plenty of room."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            missing = [path for path in self._paths() if not path.exists()]
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize >= _FREE_PARTS * self._piece_bytes * self._pieces:
                for path in missing:
                    self._allocate(path)

    def release(self) -> bool:
        """Give one piece back to the disk; False if only the one for the end is left."""
        there = [path for path in self._paths() if path.exists()]
        for path in there[:-1]:
            with contextlib.suppress(OSError):
                path.unlink()
                return True
        return False

    def release_all(self) -> None:
        """Give all pieces back: this is the end."""
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink()

    def write(self, write: Callable[[], None]) -> None:
        """Call `write`; whenever it meets a full disk, release a piece and call it again. Raises its OSError
        when it may take no more."""
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in _DISK_FULL or not self.release():
                    raise
            else:
                return

    def _paths(self) -> list[Path]:
        return [self._folder / str(number) for number in range(self._pieces)]

    def _allocate(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._piece_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
