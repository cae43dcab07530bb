"""A log of a machine as it grows, shown here: over one ssh after the other, each byte once.

Neighbours: `remote_verbs.py` has `launch logs`, `link.py` reaches the machine. Knows nothing of runs.
"""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Literal

from launcher.backends.ssh.link import SshHost
from launcher.base import sanitize
from launcher.base.descriptor_polling import wait_readable
from launcher.base.errors import JobFailed

_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 1.0
# A connection that could not be made again for so long is given up: the run goes on without.
LOST_SECONDS = 60.0
# An ssh that cannot connect gives up sooner (its ConnectTimeout, and some for the login).
_SURELY_CONNECTED_SECONDS = 20.0
# The exit code of ssh itself when it fails; every other code is the remote program's.
_SSH_FAILED = 255
_BYTES = 65536


# Of the machine: a connection to one that is going may be lost without anything being wrong.
MachineState = Literal["up", "going", "gone"]


class RemoteLog:
    """The file `path` on `host`, quoted for the shell there. `machine_state()` is the machine's last known
    state; `again` is the command that reads on."""

    def __init__(
        self, host: SshHost, path: str, follow: bool, machine_state: Callable[[], MachineState], again: str
    ) -> None:
        self._host = host
        self._path = path
        self._follow = follow
        self._machine_state = machine_state
        self._again = again
        self._shown_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log = sanitize.LogStream()

    def show(self, lost_seconds: float = LOST_SECONDS) -> None:
        """To its end, or until the machine is gone. Raises JobFailed when it cannot be read to there."""
        try:
            self._read_on(lost_seconds)
        finally:
            self._write(self._log.end())

    def _read_on(self, lost_seconds: float) -> None:
        lost_at: float | None = None
        while True:
            begun, before = time.monotonic(), self._shown_bytes
            code, last_line = self._read_once()
            if code == 0 or (self._follow and self._machine_state() != "up"):
                return
            now = time.monotonic()
            connected = self._shown_bytes > before or now - begun > _SURELY_CONNECTED_SECONDS
            lost_at = now if lost_at is None or connected else lost_at
            lost = code == _SSH_FAILED or code < 0  # ssh itself failed, or was killed
            if not lost or now - lost_at > lost_seconds:
                raise JobFailed(
                    f"the log of {self._host.address} cannot be read any further", last_line, self._again
                )
            time.sleep(_PAUSE_SECONDS)

    def _read_once(self) -> tuple[int, str]:
        """Read until it ends, the connection breaks or the machine is gone (code 0). Returns the code and
        ssh's last line."""
        following = " -F" if self._follow else ""
        tail = f"tail -c +{self._shown_bytes + 1}{following} {self._path}"
        # A file, because a process that ssh started and left behind would keep a pipe open.
        with tempfile.TemporaryFile() as stderr_file:
            reader = subprocess.Popen(
                self._host.command("--", tail),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr_file,
            )
            try:
                ended = self._show_all(reader)
            finally:
                reader.terminate()
                code = reader.wait()
                assert reader.stdout is not None  # a pipe, as asked for
                reader.stdout.close()
            stderr_file.seek(0)
            lines = stderr_file.read().decode(errors="replace").strip().splitlines()
        return (code if ended else 0), lines[-1] if lines else f"ssh ended with code {code}"

    def _show_all(self, reader: subprocess.Popen[bytes]) -> bool:
        """Show the output as it comes. True if it came to its end, False if the machine was gone before."""
        assert reader.stdout is not None
        descriptor = reader.stdout.fileno()
        while True:
            if not wait_readable([descriptor], _POLL_SECONDS):
                if self._machine_state() == "gone":
                    return False
                continue
            piece = os.read(descriptor, _BYTES)
            if not piece:
                reader.wait()
                return True
            self._shown_bytes += len(piece)
            self._write(self._log.feed(self._decoder.decode(piece)))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
