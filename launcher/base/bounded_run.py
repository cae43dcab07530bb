"""Runs a command whose output is another computer's: so much of it is read, and no more.

Neighbours: `backends/ssh/link.py` runs ssh with it. `subprocess.run` would keep in memory all that a machine
sends until the time is over. Knows nothing of ssh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO

_CHUNK_BYTES = 1 << 16


class OutputTooLong(Exception):  # noqa: N818 - the name says what happened
    """The command wrote more than it may; it was killed."""


def run_bounded(
    command: Sequence[str], stdin: bytes, bound_seconds: float, max_bytes: int
) -> subprocess.CompletedProcess[bytes]:
    """The command's exit code and output, in a session of its own. Raises OutputTooLong, and as
    `subprocess.run`: TimeoutExpired, FileNotFoundError."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [_Reader(process.pid, pipe, max_bytes) for pipe in (process.stdout, process.stderr)]
        writer = threading.Thread(target=_write, args=(process.stdin, stdin), daemon=True)
        try:
            _finish(process, (*readers, writer), bound_seconds)
        except BaseException:
            _kill(process.pid)
            raise
    if any(reader.is_too_long for reader in readers):
        raise OutputTooLong(f"more than {max_bytes >> 20} MiB")
    stdout, stderr = (bytes(reader.read) for reader in readers)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _finish(process: subprocess.Popen[bytes], threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait for the ends of its pipes and its own."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise subprocess.TimeoutExpired(process.args, seconds)
    process.wait(max(0.0, end - time.monotonic()))


def _kill(session: int) -> None:
    """All of its session: a child that has the pipes would hold up whoever reads them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads one pipe to its end, or kills the session when there is too much in it."""

    def __init__(self, session: int, pipe: IO[bytes], max_bytes: int) -> None:
        super().__init__(daemon=True)
        self._session, self._pipe, self._max_bytes = session, pipe, max_bytes
        self.read = bytearray()
        self.is_too_long = False

    def run(self) -> None:
        while chunk := self._pipe.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
            self.read += chunk
            if len(self.read) > self._max_bytes:
                self.is_too_long = True
                _kill(self._session)
                return


def _write(pipe: IO[bytes], content: bytes) -> None:
    with contextlib.suppress(OSError), pipe:  # it may end without reading all of it
        pipe.write(content)
