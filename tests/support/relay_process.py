"""A relay in a process of its own: to be stopped, measured, and listened to as on a terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from runtime.shared.processes import preexec
from tests.support.at_rest import stands_still
from tests.support.environment import PROGRAMS, runtime_environ
from tests.support.waiting import wait_until


class RelayProcess:
    """In front of `socket`, with `token`; `said` is the file that has its stderr."""

    def __init__(
        self,
        socket: Path,
        token: str,
        said: Path,
        unproven_seconds: float = 10.0,
        silent_seconds: float = 60.0,
        keyless: bool = False,
    ) -> None:
        bounds = [str(unproven_seconds), str(silent_seconds), *(["keyless"] if keyless else [])]
        self.token = token
        self.said = said
        with said.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAMS / "unit" / "open_relay.py", socket, token, *bounds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=runtime_environ(),
                preexec_fn=preexec(signal.SIGTERM),
            )
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def bytes_held(self) -> int:
        """Its resident memory."""
        return psutil.Process(self._process.pid).memory_info().rss

    @property
    def connections(self) -> int:
        """Clients connected to it now."""
        found = psutil.Process(self._process.pid).net_connections("tcp")
        return sum(one.laddr.port == self.port and one.status != psutil.CONN_LISTEN for one in found)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, it stands still, as when the laptop sleeps."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: stands_still(self.pid))
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.communicate(timeout=60)
