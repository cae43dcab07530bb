"""Bounded calls of SkyPilot: each ends in an answer or in an error of ours, or is left behind.

Neighbours: `sky_calls.py` is the process at the other end, in a `sky_home.py`; `cloud_machine.py` asks.
Translates SkyPilot's errors; knows nothing of the run.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from launcher.backends.skypilot.sky_home import SERVER_SECONDS, SkyHome
from launcher.base.errors import CapacityError, LaunchError, PreflightError
from launcher.base.failpoints import failpoint
from launcher.base.module_command import module_command
from launcher.base.processes import ProcessId
from launcher.types.machine import Progress, no_progress

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# SkyPilot's exceptions by name, most telling first.
_NO_CAPACITY = {"ResourcesUnavailableError", "ResourcesMismatchError"}
_NOBODY = "NoCloudAccessError"
_NO_ACCESS = {"InvalidCloudCredentials", "InvalidCloudConfigs", "CloudUserIdentityError"}
_NO_SERVER = {
    "ApiServerConnectionError", "APIVersionMismatchError", "ConnectionError", "RequestInterruptedError",
    "ServerTemporarilyUnavailableError",
}  # fmt: skip
# While the API server works at a call it is asked for its health so often, and may be silent so long: on a
# busy computer an answer takes seconds.
_HEALTH_POLL_SECONDS = 5.0
_PROGRESS_SECONDS = 20.0
_SERVER_STALL_SECONDS = 90.0
_NO_CATALOG = ("catalog", "Catalog")
_UNINSTALLED = "ModuleNotFoundError"
# The error of a prompt without a user to answer it; botocore's is for a profile with `mfa_serial`.
_PROMPTED = ("EOFError", "EOF when reading a line")


class SkyCallError(PreflightError):
    """A call that SkyPilot answered with an error none of the others fits; `kinds` are its class names."""

    def __init__(self, call: str, kinds: list[str], text: str, log: Path) -> None:
        super().__init__(f"SkyPilot's {call} failed", f"{kinds[0]}: {_last_line(text)}", f"less {log}")
        self.kinds = kinds


class NoAccessError(PreflightError):
    """No provider accepts our credentials, so none was asked for a machine."""


class SkyCallTimeoutError(LaunchError):
    """A call that did not end in time. Its request may still take effect."""


class SkyProcess:
    """One process that has imported SkyPilot; started when first needed, again after a call was left behind.

    It outlives the API server it asks. The modules that end a machine are imported in it, so it works even if
    SkyPilot's files change meanwhile. `log` gets all of SkyPilot's output.
    """

    def __init__(self, home: SkyHome, log: Path) -> None:
        self._home = home
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        # The API server it knows: a new one has a new port.
        self._port: int | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._progress: Progress = no_progress
        # Two threads of one launch ask here: the one that watches the machine and the one that brings results
        # home.
        self._one_at_a_time = threading.Lock()

    def call(
        self, name: str, bound_seconds: float, progress: Progress = no_progress, /, **arguments: Any
    ) -> Any:
        """The answer of `sky_calls.<name>`.

        Raises CapacityError, NoAccessError, PreflightError, SkyCallError, SkyCallTimeoutError.
        """
        with self._one_at_a_time:
            return self._call(name, bound_seconds, progress, arguments)

    def _call(self, name: str, bound_seconds: float, progress: Progress, arguments: dict[str, Any]) -> Any:
        process = self._running()
        assert process.stdin is not None
        self._progress = progress
        try:
            process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            process.stdin.flush()
            if name == "launch":
                failpoint("cloud.asked")
            line = self._answer(bound_seconds, watched=name == "launch" or bool(arguments.get("by_server")))
        except queue.Empty:
            self.end()
            raise SkyCallTimeoutError(
                f"SkyPilot's {name} did not finish within {bound_seconds:.0f} s",
                "launch stopped waiting for it",
                f"less {self._log}",
            ) from None
        except BrokenPipeError:
            line = None
        except BaseException:  # interrupted: its answer must not be taken for the next call's
            self.end()
            raise
        finally:
            self._progress = no_progress
        if line is None:
            code = process.wait()
            self.end()
            raise SkyCallError(name, ["Ended"], f"its process ended with code {code}", self._log)
        answer = json.loads(line)
        if "error" in answer:
            raise _translated(name, answer["error"]["kinds"], answer["error"]["text"], self._log)
        return answer["answer"]

    def _answer(self, bound_seconds: float, watched: bool) -> str | None:
        """The next answer; None when there will be none. Raises queue.Empty; PreflightError when the API
        server, which works at it, has fallen silent."""
        bound = time.monotonic() + bound_seconds
        heard, told = time.monotonic(), False
        while True:
            left = bound - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(left, _HEALTH_POLL_SECONDS)))
            except queue.Empty:
                if left <= 0:
                    raise
            if not watched or self._home.healthy():
                heard, told = time.monotonic(), False
                continue
            silent_for = time.monotonic() - heard
            if silent_for >= _PROGRESS_SECONDS and not told:
                self._progress(f"SkyPilot's API server has not answered for {silent_for:.0f} s")
                told = True
            if silent_for >= _SERVER_STALL_SECONDS:
                raise PreflightError(
                    "SkyPilot's API server is in trouble",
                    f"it has not answered for {silent_for:.0f} s; launch stopped waiting for it",
                    f"less {self._home.folder / 'api-server.log'}",
                )

    def warm_up(self) -> None:
        """Start the process now. It imports everything that ends a machine, so that nothing must be read
        from disk later. Raises OSError."""
        self._start("--ahead")

    def serve(self, bound_seconds: float = SERVER_SECONDS) -> None:
        """Have the home's API server answer. Raises NoServerError."""
        self._home.serve(bound_seconds, self._own())

    def end_server(self) -> None:
        """End the API server, and the remains of others' calls."""
        self._home.end_server(self._own())

    def pause_server(self) -> None:
        """End the API server while it has nothing to do: the end needs none. It is ended at once: its
        state is in its databases, and it has no work in progress."""
        self._home.end_server(self._own(), grace_seconds=0)

    def _own(self) -> set[ProcessId]:
        process = None if self._process is None else ProcessId.of(self._process.pid)
        return set() if process is None else {process}

    def end(self) -> None:
        """Leave a call in progress behind; the next call starts anew."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None and self._port == self._home.port():
            return self._process
        self.end()
        return self._start()

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self._port = self._home.port()
        self._process = subprocess.Popen(
            [*module_command("launcher.backends.skypilot.sky_calls"), *words],
            cwd=self._home.folder,
            env=self._home.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for us, not for a call in the middle
        )
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers = answers
        threading.Thread(target=_read, args=(self._process.stdout, answers), daemon=True).start()
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()
        return self._process

    def _listen(self, stderr: IO[str]) -> None:
        """Forward SkyPilot's lines, without colours, to the log and to the waiting caller. They are read to
        their end even if the log fails: a process whose output is not read stands still."""
        with stderr:
            for line in stderr:
                plain = _COLOUR.sub("", line).replace("\r", "").rstrip()
                if plain:
                    with contextlib.suppress(OSError), self._log.open("a") as log:
                        log.write(plain + "\n")
                    self._progress(plain)


def _read(answers: IO[str], into: queue.SimpleQueue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # closed under us, by end()
        for line in answers:
            into.put(line)
    into.put(None)


def _translated(call: str, kinds: list[str], text: str, log: Path) -> LaunchError:
    """SkyPilot's error as one of ours."""
    found = set(kinds)
    why = _last_line(text)
    if _UNINSTALLED in found:
        return PreflightError("SkyPilot is not installed here", text, "pip install 'slipway-rl[cloud]'")
    if _PROMPTED[0] in found or _PROMPTED[1] in text:
        return PreflightError(
            "the cloud asks for a code, and nobody can type it here",
            f"a profile that wants MFA is asked in the background ({why})",
            'eval "$(aws configure export-credentials --format env)"  # asks you; then the same again',
        )
    if found & _NO_CAPACITY:
        return CapacityError(
            "no cloud has these GPUs available now",
            why,
            "run the same command with other places in --infra, or other --gpus",
        )
    if _NOBODY in found:
        return NoAccessError("the cloud does not accept your credentials", why, "sky check")
    if found & _NO_ACCESS:
        return PreflightError("the cloud does not accept your credentials", why, "sky check")
    if found & _NO_SERVER:
        return PreflightError("SkyPilot's API server is in trouble", why, f"less {log}")
    if any(word in text for word in _NO_CATALOG):
        return PreflightError(
            "SkyPilot has no price catalog",
            why,
            "run `launch plan` with the same --gpus and --infra and with --refresh, which fetches it",
        )
    return SkyCallError(call, kinds, text, log)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"
