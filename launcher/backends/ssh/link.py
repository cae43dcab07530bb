"""Forwards a local Unix socket to one on a machine: ssh, supervised and probed end to end.

Neighbours: `cloud_machine.py` opens one for its runtime, `relay.py` is in front of it and asks again after a
loss. Only an HTTP answer through the link counts as health: on a frozen link ssh itself reports no problem.
The machine's host key is pinned in the run's own file; the user's ssh configuration is not read. Knows
nothing of SkyPilot or of the requests that go through it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.base import processes
from launcher.base.bounded_run import OutputTooLong, run_bounded
from launcher.base.errors import JobFailed, LaunchError, PreflightError
from launcher.base.log import LOGGER
from launcher.base.unix_http import get_json
from runtime.shared import open_files

PROBE_EVERY_SECONDS = 2.0
# A probe through a link that works takes milliseconds; three that do not come make a frozen link.
PROBE_SECONDS = 4.0
MAX_UNANSWERED_SECONDS = 12.0
# Of a command there: the state of a run and the ends of its logs take some 100 KiB.
MAX_OUTPUT_BYTES = 8 << 20
_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 2.0
_END_SECONDS = 2.0
_ERROR_TAIL_BYTES = 4096
_CHANGED = ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed")
_REFUSED = ("Permission denied", "Bad owner or permissions")
# Options of an ssh without a user: it asks nothing, shares no connection and notices a machine that is gone.
_UNATTENDED = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ControlMaster": "no",
    "ControlPath": "none",
    "LogLevel": "ERROR",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "5",
}


@dataclass(frozen=True)
class SshHost:
    """A machine's ssh address. `known_hosts` is the run's own file: its first key is the only one.
    `proxy_command` if the connection goes through another program (Slurm, Kubernetes)."""

    address: str
    user: str
    key: Path
    known_hosts: Path
    port: int = 22
    proxy_command: str | None = None

    @classmethod
    def from_cluster_status(cls, cluster_status: dict[str, Any], known_hosts: Path) -> Self:
        """The machine of an entry in SkyPilot's books (`sky_calls.cluster_status`)."""
        login, key = cluster_status["ssh"], Path(cluster_status["ssh"]["key"])
        address, proxy_command = cluster_status["address"], login["proxy_command"]
        return cls(address, login["user"], key, known_hosts, login["port"], proxy_command)

    def login(self) -> dict[str, str]:
        """Address, user and key as ssh's configuration has them, also for the user's own ssh."""
        options = {
            "HostName": self.address,
            "User": self.user,
            "Port": str(self.port),
            "IdentityFile": _quoted(self.key),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": _quoted(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            # The first key is kept, any other one refused from then on.
            "StrictHostKeyChecking": "accept-new",
            "UpdateHostKeys": "no",
        }
        return options if self.proxy_command is None else options | {"ProxyCommand": self.proxy_command}

    def options(self) -> list[str]:
        """ssh's options, and scp's: complete, so that nothing comes from the user's configuration."""
        options = {**_UNATTENDED, **self.login()}
        return ["-F", "/dev/null", *(word for key in options for word in ("-o", f"{key}={options[key]}"))]

    def configuration(self, *names: str) -> str:
        """The login as a block of ssh's configuration, under these names."""
        return _block(names, self.login())

    def own_configuration(self) -> str:
        """All of `options`, as a configuration for this one machine: for a program that takes ssh with a
        file's name but splits it at blanks (the rsync of macOS)."""
        return _block(("*",), {**_UNATTENDED, **self.login()})

    def command(self, *remote: str, flags: tuple[str, ...] = ()) -> list[str]:
        """The ssh command line; the shell there gets `remote`."""
        return ["ssh", *flags, *self.options(), self.address, *remote]


def _block(names: Iterable[str], options: Mapping[str, str]) -> str:
    lines = [f"Host {' '.join(names)}", *(f"  {key} {value}" for key, value in options.items())]
    return "\n".join(lines) + "\n"


def _quoted(path: Path) -> str:
    """A path as ssh's options take it: spaces would end it, a percent sign begin something else."""
    return '"' + str(path).replace("%", "%%") + '"'


def run_on(
    host: SshHost,
    command: str,
    *,
    stdin: bytes = b"",
    bound_seconds: float = 60.0,
    max_bytes: int = MAX_OUTPUT_BYTES,
) -> subprocess.CompletedProcess[bytes]:
    """A shell command on the machine, to its end. Raises LaunchError when ssh itself fails, is too slow, or
    brings more than `max_bytes`."""
    try:  # in a session of its own: a Ctrl-C is for us, and bringing results home goes on after it
        done = run_bounded(host.command("--", command), stdin, bound_seconds, max_bytes)
    except OutputTooLong as error:
        raise _connection_lost(host, f"it sent {error}") from None
    except subprocess.TimeoutExpired:
        raise _connection_lost(host, f"not finished after {bound_seconds:.0f} s") from None
    except FileNotFoundError:
        raise _connection_lost(host, "there is no ssh on this computer") from None
    if done.returncode == 255:
        raise _failure(host, done.stderr.decode(errors="replace"))
    return done


class Link:
    """The forward from `local` here to `remote` there. Between `start` and `close` it mends itself."""

    def __init__(self, host: SshHost, local: Path, remote: str, probe: str = "/healthz") -> None:
        self._host = host
        self._local = local
        self._remote = remote
        self._probe = probe
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._ssh: subprocess.Popen[bytes] | None = None
        self._supervisor: threading.Thread | None = None
        self._heard_at = 0.0
        self._failure: LaunchError | None = None

    @property
    def failure(self) -> LaunchError | None:
        """The reason the link cannot recover: a host key that changed, or a key that is refused."""
        return self._failure

    def start(self) -> None:
        """Start to supervise, without waiting: the other end may not be up yet."""
        open_files.raise_limit()  # before the first ssh, which has a descriptor for each request in progress
        self._heard_at = time.monotonic()
        self._supervisor = threading.Thread(target=self._supervise, name="link", daemon=True)
        self._supervisor.start()

    def close(self) -> None:
        """End ssh and remove the socket; may be called twice."""
        self._closing.set()
        if self._supervisor is not None and self._supervisor is not threading.current_thread():
            self._supervisor.join(timeout=PROBE_SECONDS + _END_SECONDS + 1)
        self._end_ssh()
        self._local.unlink(missing_ok=True)

    # -------------------------------------------------------------- the supervisor

    def _supervise(self) -> None:
        """One ssh after the other, each for as long as the machine answers through it."""
        pause = _PAUSE_SECONDS
        while not self._closing.is_set():
            try:
                answered = self._run_one_connection()
            except OSError as error:  # no process to be had, a full disk: that may pass
                LOGGER.warning("the link to %s: %s", self._host.address, error)
                answered = False
            self._end_ssh()
            if self._closing.is_set():
                return
            stderr_text = self._error_tail()
            if any(mark in stderr_text for mark in (*_CHANGED, *_REFUSED)):
                self._failure = _failure(self._host, stderr_text)
                return
            # At once after a link that worked; a machine that cannot be reached is not hammered.
            pause = _PAUSE_SECONDS if answered else min(2 * pause, _MAX_PAUSE_SECONDS)
            self._closing.wait(pause if not answered else 0)

    def _run_one_connection(self) -> bool:
        """Start ssh and probe through it until it ends or nothing is heard; whether it ever worked."""
        ssh = self._start_ssh()
        begun = time.monotonic()
        answered = False
        while not self._closing.is_set() and ssh.poll() is None:
            if self._answers():
                answered = True
                self._wait_for_end(ssh, PROBE_EVERY_SECONDS)
                continue
            if time.monotonic() - max(begun, self._heard_at) > MAX_UNANSWERED_SECONDS:
                return answered
            self._wait_for_end(ssh, _PAUSE_SECONDS)
        return answered

    def _wait_for_end(self, ssh: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait until ssh ends, or for `seconds`; less when we close."""
        bound = time.monotonic() + seconds
        while time.monotonic() < bound and not self._closing.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                ssh.wait(timeout=min(0.25, max(0.0, bound - time.monotonic())))
                return

    def _answers(self) -> bool:
        try:
            get_json(self._local, self._probe, timeout_seconds=PROBE_SECONDS)
        except OSError:
            return False
        self._heard_at = time.monotonic()
        return True

    def _start_ssh(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        # A cleaner of /tmp must not cost the run its socket.
        self._local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = (
            "-N", "-n", "-T",
            "-o", "ExitOnForwardFailure=yes",
            "-o", "StreamLocalBindUnlink=yes",
            "-o", "StreamLocalBindMask=0177",
            "-L", f"{self._local}:{self._remote}",
        )  # fmt: skip
        with self._log.open("wb") as log:
            ssh = subprocess.Popen(
                self._host.command(flags=flags),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # An unsupervised forward is of no use: it ends with us, however we end.
                preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, parent),
            )
        with self._lock:
            self._ssh = ssh
        return ssh

    def _end_ssh(self) -> None:
        with self._lock:
            ssh, self._ssh = self._ssh, None
        if ssh is None:
            return
        ssh.terminate()
        try:
            ssh.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            ssh.kill()  # frozen: it does not act on TERM
            ssh.wait()

    @property
    def _log(self) -> Path:
        return self._local.with_name(f"{self._local.name}.ssh.log")

    def _error_tail(self) -> str:
        """The end of ssh's error output."""
        try:
            return self._log.read_bytes()[-_ERROR_TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def _failure(host: SshHost, stderr_text: str) -> LaunchError:
    """ssh's error output as one of our errors."""
    if any(mark in stderr_text for mark in _CHANGED):
        return PreflightError(
            f"{host.address} may be a different machine: its host key has changed",
            "another machine has its address now, or someone intercepts the connection",
            f"launch down RUN  # if you replaced the machine yourself: rm {host.known_hosts}",
        )
    return _connection_lost(host, stderr_text)


def _connection_lost(host: SshHost, stderr_text: str) -> LaunchError:
    lines = [line.strip() for line in stderr_text.splitlines() if line.strip()]
    return JobFailed(
        f"{host.address} cannot be reached by ssh",
        lines[-1] if lines else "ssh printed nothing",
        " ".join(host.command("hostname")),
    )
