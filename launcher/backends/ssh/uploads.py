"""A large upload to a machine, which resumes after a broken connection.

Neighbours: `model_upload.py` and `checkpoint_upload.py` use it, `rsync.py` does the copying: files and parts
of files that are there already are not sent again. Knows nothing of the content.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.backends.ssh import rsync
from launcher.backends.ssh.remote_folder import SSH_BY_FILE, RemoteFolder
from launcher.backends.ssh.rsync import RsyncError, Transfer
from launcher.base import disk
from launcher.base.errors import JobFailed
from launcher.types.machine import Progress

# The least patience with a line that breaks again and again.
_MIN_SECONDS = 900.0
_PAUSE_SECONDS = 3.0


@dataclass(frozen=True)
class Upload:
    """`what`: the upload's name in messages. `hint`: the user's remedy if it fails."""

    what: str
    hint: str | None = None

    def run(
        self,
        remote: RemoteFolder,
        words: list[str],
        copy: Transfer,
        progress: Progress,
        on_disconnect: Callable[[], object],
    ) -> None:
        """Run rsync with these arguments until everything is there. `on_disconnect` is called whenever the
        connection breaks, and may raise. Raises JobFailed, LaunchError."""
        bound = time.monotonic() + max(_MIN_SECONDS, copy.size / rsync.MIN_BYTES_PER_SECOND)
        while (trouble := self._attempt(remote, words, copy)) is not None:
            on_disconnect()
            if time.monotonic() > bound:
                size = disk.format_bytes(copy.size)
                raise self._failed(f"took longer than even a slow connection needs for {size}", trouble)
            progress(f"the connection broke, continuing: {trouble}")
            time.sleep(_PAUSE_SECONDS)

    def _attempt(self, remote: RemoteFolder, words: list[str], copy: Transfer) -> str | None:
        """One rsync; None when all is there, else how the connection broke. Raises JobFailed for all else."""
        try:
            rsync.run(["-e", SSH_BY_FILE, *words], remote.write_ssh_config(), copy)
        except RsyncError as error:
            if error.lost:
                return error.why
            raise self._failed("could not be copied", error.why) from error
        except FileNotFoundError:
            raise JobFailed("copying needs rsync", "it is not on this computer", "launch doctor") from None
        return None

    def _failed(self, how: str, why: str) -> JobFailed:
        return JobFailed(f"{self.what} {how}", why, self.hint)
