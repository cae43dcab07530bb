"""Runs a command whose output is another computer's: so much of it is read, and no more.

Neighbours: `backends/ssh/link.py` runs ssh with it. `subprocess.run` would keep in memory all that a machine
sends until the time is over. Knows nothing of ssh.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
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
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [_Reader(pipe, max_bytes) for pipe in (process.stdout, process.stderr)]
        try:
            _finish(process, (_Writer(process.stdin, stdin), *readers), bound_seconds)
        except BaseException:  # a Ctrl-C too: the command, and all of its session, must not go on
            _kill(process.pid)
            raise
    stdout, stderr = (bytes(reader.read) for reader in readers)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _finish(
    process: subprocess.Popen[bytes], ends: Sequence[_Writer | _Reader], bound_seconds: float
) -> None:
    """Wait for the ends of its pipes and its own. No thread does: a process outside the session may hold a
    pipe for as long as it likes, and a pipe in which a thread reads cannot be closed."""
    bound = time.monotonic() + bound_seconds
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end.pipe, end.event, end)
        while selector.get_map():
            left = bound - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, bound_seconds)
            for key, _ in selector.select(left):
                if not key.data.advance():
                    selector.unregister(key.data.pipe)
                    key.data.pipe.close()
    process.wait(max(0.0, bound - time.monotonic()))


def _kill(session: int) -> None:
    """All of its session: a child that has the pipes would go on."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


class _Reader:
    """Reads one pipe to its end, as it comes."""

    event = selectors.EVENT_READ

    def __init__(self, pipe: IO[bytes], max_bytes: int) -> None:
        self.pipe = pipe
        self.read = bytearray()
        self._max_bytes = max_bytes

    def advance(self) -> bool:
        """Read what is there; False at the end. Raises OutputTooLong."""
        chunk = os.read(self.pipe.fileno(), _CHUNK_BYTES)
        self.read += chunk
        if len(self.read) > self._max_bytes:
            raise OutputTooLong(f"more than {self._max_bytes >> 20} MiB")
        return bool(chunk)


class _Writer:
    """Writes one pipe, as fast as it is read."""

    event = selectors.EVENT_WRITE

    def __init__(self, pipe: IO[bytes], content: bytes) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self._left = memoryview(content)

    def advance(self) -> bool:
        """Write what it takes; False when all is written, or nobody reads any more."""
        try:
            self._left = self._left[os.write(self.pipe.fileno(), self._left[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return True
        except OSError:  # it may end without reading all of it
            return False
        return len(self._left) > 0
