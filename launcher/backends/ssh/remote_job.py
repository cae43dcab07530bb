"""A script that runs on a machine by itself: in a session of its own, with a log and an exit file.

Neighbours: `cloud_machine.py` sets up and serves by these, `machine_scripts.py` has the scripts, `link.py` is
the way there. The scripts run over our own ssh and not as SkyPilot's jobs: a SkyPilot job costs 10 to 25 s
before it begins, and its log comes only at its end. A script here costs under a second, shows its lines as
they come, and like a job outlives the link that started it. Its stdin goes there in the same message and
stays in memory. Knows nothing of the scripts' work.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable

from launcher.backends.ssh.link import MAX_OUTPUT_BYTES
from launcher.backends.ssh.machine_scripts import CODE
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.base.errors import JobFailed, LaunchError, PreflightError
from launcher.types.machine import Progress

LINES = 12
_POLL_TIMEOUT_SECONDS = 30.0
# How long one question waits on the machine for an end before it reports the output so far.
_REMOTE_WAIT_SECONDS = 5
# Of its output at a time; the rest comes with the next questions.
_MAX_HEARD_BYTES = MAX_OUTPUT_BYTES // 2
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
# `timeout` ends the script on the machine; an answer that is lost on the way is waited for so much longer.
_SLACK_SECONDS = 90.0
# The exit code of `timeout` when it had to end the script.
_TIMED_OUT = 124

# One at a time: a second start of a running script (its answer was lost) starts nothing. The text after the
# script is its stdin: whole or not at all, and only ever in memory and in a pipe.
_START = """
umask 077
mkdir -p ~/{code} {folder}/jobs {folder}/logs && cd {folder} || exit 1
head -c {script_bytes} > jobs/{name}.sh.new
given=$(cat; echo .)
test "$(wc -c < jobs/{name}.sh.new)" = {script_bytes} || exit 1
test "$(printf %s "$given" | wc -c)" = {given_bytes} || exit 1
mv jobs/{name}.sh.new jobs/{name}.sh
rm -f jobs/{name}.exit
cd ~/{code}
printf %s "${{given%.}}" | setsid -f flock -n -o {folder}/jobs/{name}.lock bash -c {run} >/dev/null 2>&1
"""
_RUN = (
    "{limit} bash {folder}/jobs/{name}.sh > {folder}/logs/{name}.log 2>&1;"
    " echo $? > {exit}.new; mv {exit}.new {exit}"
)
# A waiting caller is a living one: the machine's own timer is reset, until the runtime's keeper does that.
_WATCH = """
cd ~/{code} && python3 -m runtime.autodown 2>/dev/null
i=0; until test -f {exit} || test $i -ge {polls}; do sleep 0.2; i=$((i + 1)); done
cat {exit} 2>/dev/null || echo -
tail -c +{offset} {log} 2>/dev/null | head -c {max_bytes}
"""


class RemoteJob:
    """One script in the run's folder on a machine, by its `name`."""

    def __init__(self, remote: RemoteFolder, name: str) -> None:
        self._remote = remote
        self._name = name
        self._folder = shlex.quote(remote.there)
        self._heard_bytes = 0
        self._has_more = False
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=LINES)

    def start(self, script: str, bound_seconds: float | None = None, stdin: bytes = b"") -> None:
        """Start it, ended there after the bound. `stdin` is less than a pipe holds (64 KiB).

        Raises LaunchError when the machine cannot be reached.
        """
        limit = "" if bound_seconds is None else f"timeout -k 10 {bound_seconds:.0f}"
        run = _RUN.format(limit=limit, folder=self._folder, name=self._name, exit=self._exit)
        start = _START.format(
            code=CODE,
            folder=self._folder,
            name=self._name,
            run=shlex.quote(run),
            script_bytes=len(script.encode()),
            given_bytes=len(stdin) + 1,
        )
        for attempt in range(_ATTEMPTS):
            try:
                self._remote.shell(
                    start, f"start {self._name}", script.encode() + stdin, _POLL_TIMEOUT_SECONDS
                )
                return
            except PreflightError:  # another machine answers there
                raise
            except LaunchError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def wait(
        self, bound_seconds: float, progress: Progress, on_disconnect: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until it has ended well; its lines go to `progress`. `on_disconnect` is called whenever the
        machine cannot be reached, and may raise. Raises JobFailed with its last lines."""
        bound = time.monotonic() + bound_seconds + _SLACK_SECONDS
        code: int | None = None
        lost: LaunchError | None = None
        while code is None:
            if time.monotonic() > bound:
                raise lost or self._failed(f"did not finish within {bound_seconds:.0f} s")
            try:
                code = self._poll(progress)
                lost = None
            except PreflightError:
                raise
            except LaunchError as error:  # the script goes on without us
                on_disconnect()
                lost = error
                progress(f"{error.message}: {error.why}")
                time.sleep(_PAUSE_SECONDS)
        if code == _TIMED_OUT:
            raise self._failed(f"was stopped after {bound_seconds:.0f} s")
        if code != 0:
            raise self._failed(f"failed on the machine (exit code {code})")

    def _poll(self, progress: Progress) -> int | None:
        """Read its new output; its exit code once it has ended and all of it is read."""
        watch = _WATCH.format(
            code=CODE,
            exit=self._exit,
            polls=0 if self._has_more else _REMOTE_WAIT_SECONDS * 5,
            offset=self._heard_bytes + 1,
            max_bytes=_MAX_HEARD_BYTES,
            log=f"{self._folder}/logs/{self._name}.log",
        )
        output = self._remote.shell(watch, f"check {self._name}", bound_seconds=_POLL_TIMEOUT_SECONDS)
        code, _, heard = output.partition(b"\n")
        self._heard_bytes += len(heard)
        self._has_more = len(heard) == _MAX_HEARD_BYTES
        is_over = code != b"-" and not self._has_more
        self._save_log(heard)
        *whole, self._rest = (self._rest + heard).split(b"\n")
        if is_over and self._rest:
            whole.append(self._rest)
        for line in (line.decode(errors="replace").strip() for line in whole):
            if line:
                self.lines.append(line)
                progress(line)
        return int(code) if is_over else None

    def _save_log(self, heard: bytes) -> None:
        """Save its log here as well: nothing else of a failed set-up is downloaded."""
        log = self._remote.here / "logs" / f"{self._name}.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("wb" if self._heard_bytes == len(heard) else "ab") as file:
            file.write(heard)

    def _failed(self, how: str) -> JobFailed:
        run_id = self._remote.there.rpartition("/")[2]
        return JobFailed(
            f"{self._name} {how}",
            self.lines[-1] if self.lines else "it printed nothing",
            f"launch logs {run_id} --which {self._name}",
            last_lines=self.lines if len(self.lines) > 1 else (),
        )

    @property
    def _exit(self) -> str:
        return f"{self._folder}/jobs/{self._name}.exit"
