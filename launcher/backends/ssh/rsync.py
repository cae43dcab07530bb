"""Runs rsync and reports its progress; ends it when it stalls or is too slow.

Neighbours: `results_download.py` downloads results by this, `remote_folder.py` sends folders,
`model_upload.py` a model. A copy's time limit follows from its size, so one that moves is never ended for its
length. Knows nothing of the files, or of ssh.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.base import disk
from launcher.base.descriptor_polling import wait_readable
from launcher.base.units import format_duration, format_rate
from launcher.types.machine import Stopped, never_stopped

# The slowest line that is still accepted: 0.8 Mbit/s. A copy that is slower on average is ended.
MIN_BYTES_PER_SECOND = 100_000.0
# Nothing of it for so long is a line that stands still; ssh itself notices a machine that is gone after 15 s.
STALL_SECONDS = 60.0
# Time to connect, to compare files, and to be held up once.
_MIN_SECONDS = 180.0
_POLL_SECONDS = 0.25
_END_SECONDS = 5.0
# So much later than we would, where we see that it stands still, it ends by itself: in words of its own.
_LATER_SECONDS = 15
_READ_BYTES = 65536
# rsync's words for a connection that broke, and ssh's.
_CONNECTION_LOST = (10, 12, 30, 35, 255)
# "Some files vanished before they could be copied."
_VANISHED = 24
_PROGRESS_LINE = re.compile(rb"([\d.,]+)\s+\d+%\s+([\d.]+)([kMGT]?)B/s")
_POWERS = (b"", b"k", b"M", b"G", b"T")


class RsyncError(Exception):
    """A copy that failed. `lost`: its connection broke, so another try may work."""

    def __init__(self, why: str, *, lost: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.lost = lost


@dataclass(frozen=True)
class TransferProgress:
    """The progress of a copy: bytes copied, bytes in all, and bytes a second as rsync measures them."""

    bytes: int
    of: int
    bytes_per_second: float

    def describe(self) -> str:
        """ "120 MB of 450 MB, 2.4 MB/s, 2m 20s left"."""
        text = f"{disk.format_bytes(self.bytes)} of {disk.format_bytes(max(self.of, self.bytes))}"
        if self.bytes_per_second <= 0:
            return text
        left = max(0, self.of - self.bytes) / self.bytes_per_second
        return f"{text}, {format_rate(self.bytes_per_second)}, {format_duration(left)} left"


def ignore_progress(moved: TransferProgress) -> None:
    """No progress is read."""


@dataclass(frozen=True)
class Transfer:
    """One copy: `size`, the bytes to copy; `seen` gets the progress about once a second; `stopped` tells
    whether the copy is no longer wanted; `rate`, the most bytes a second, None for no limit. `still_seconds`
    and `slowest` (bytes a second) are the bounds at which it is ended."""

    size: int
    seen: Callable[[TransferProgress], object] = ignore_progress
    stopped: Stopped = never_stopped
    rate: float | None = None
    still_seconds: float = STALL_SECONDS
    slowest: float = MIN_BYTES_PER_SECOND

    @property
    def bound_seconds(self) -> float:
        """The time limit: the size at the slowest rate, which is never more than half of its limit `rate`."""
        slowest = self.slowest if self.rate is None else min(self.slowest, self.rate / 2)
        return _MIN_SECONDS + self.size / slowest


def run(arguments: list[str], folder: Path, copy: Transfer) -> TransferProgress:
    """Run rsync with these arguments in `folder`; returns the bytes copied. A partial file is continued.

    Raises RsyncError, FileNotFoundError if there is no rsync.
    """
    still_seconds = max(1, round(copy.still_seconds)) + (_LATER_SECONDS if _progress_options() else 0)
    command = ["rsync", "--partial", f"--timeout={still_seconds}", *_progress_options()]
    if copy.rate is not None:
        command.append(f"--bwlimit={max(1, round(copy.rate / 1024))}")
    # A file, because a process that ssh started and left behind would keep a pipe open.
    with (
        tempfile.TemporaryFile() as stderr_file,
        subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            cwd=folder,
            start_new_session=True,  # a Ctrl-C is for us: results go on coming home after the first
        ) as rsync,
    ):
        watched = _RsyncProcess(rsync, copy)
        try:
            ended = watched.until_its_end()
        finally:  # interrupted as well: it must not go on alone
            _end(rsync)
        stderr_file.seek(0)
        lines = [
            line.strip() for line in stderr_file.read().decode(errors="replace").splitlines() if line.strip()
        ]
    if ended is not None:
        raise RsyncError(ended, lost=not copy.stopped())
    code = rsync.returncode
    if code not in (0, _VANISHED):
        why = next((line for line in lines if not line.startswith("rsync error")), None)
        raise RsyncError(why or f"rsync ended with code {code}", lost=code in _CONNECTION_LOST or code < 0)
    return watched.moved


class _RsyncProcess:
    """One rsync until it ends."""

    def __init__(self, rsync: subprocess.Popen[bytes], copy: Transfer) -> None:
        self._rsync = rsync
        self._copy = copy
        self._begun = self._moved_at = time.monotonic()
        self.moved = TransferProgress(0, copy.size, 0.0)

    def until_its_end(self) -> str | None:
        """None when it ended by itself, else the reason to end it."""
        assert self._rsync.stdout is not None  # a pipe, as asked for
        descriptor = self._rsync.stdout.fileno()
        while True:
            if wait_readable([descriptor], _POLL_SECONDS):
                piece = os.read(descriptor, _READ_BYTES)
                if not piece:
                    return self._read_remaining_output()
                self._parse_output(piece)
            if (why := self._why_to_end()) is not None:
                return why

    def _read_remaining_output(self) -> str | None:
        """Wait for its end, now that it has closed its output; the reason if it must be ended before."""
        while self._rsync.poll() is None:
            if (why := self._why_to_end()) is not None:
                return why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._rsync.wait(timeout=_POLL_SECONDS)
        return None

    def _parse_output(self, piece: bytes) -> None:
        """rsync writes one line over and over, without ending it."""
        told = _PROGRESS_LINE.findall(piece)
        if not told:
            return
        count, rate, power = told[-1]
        moved = int(re.sub(rb"\D", b"", count))
        if moved > self.moved.bytes:
            self._moved_at = time.monotonic()
        self.moved = TransferProgress(moved, self._copy.size, float(rate) * 1024 ** _POWERS.index(power))
        self._copy.seen(self.moved)

    def _why_to_end(self) -> str | None:
        now, copy = time.monotonic(), self._copy
        if copy.stopped():
            return "it was interrupted"
        if _progress_options() and now - self._moved_at > copy.still_seconds:
            return f"it stalled for {copy.still_seconds:.0f} s, {self.moved.describe()}"
        if now - self._begun > copy.bound_seconds:
            return f"it was slower than {format_rate(copy.slowest)}: {self.moved.describe()}"
        return None


def _end(rsync: subprocess.Popen[bytes]) -> None:
    """End it; the partial file stays, for the next try."""
    if rsync.poll() is not None:
        return
    rsync.terminate()
    try:
        rsync.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        rsync.kill()
        rsync.wait()
    # Its second process puts the part that came in its place, and may be at it still.
    bound = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < bound:
            os.killpg(rsync.pid, 0)
            time.sleep(_POLL_SECONDS / 10)


@functools.cache
def _progress_options() -> tuple[str, ...]:
    """The options by which rsync reports its progress; macOS's rsync has none."""
    output = subprocess.run(["rsync", "--version"], capture_output=True, text=True, errors="replace").stdout
    version = re.match(r"rsync\s+version (\d+)\.(\d+)", output)
    able = version is not None and (int(version[1]), int(version[2])) >= (3, 1)
    return ("--info=progress2", "--no-inc-recursive") if able else ()
