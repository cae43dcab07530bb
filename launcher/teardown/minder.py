"""Runs the user's command and leaves none of its descendants, whichever process dies first.

    python -m launcher.teardown.minder --pipe FD [--keep FILE] -- COMMAND…

The command keeps the terminal: same input, same foreground process group, so Ctrl-C reaches it from there.
Its output goes straight to its own streams, or, with `--keep`, through here, where it is kept as well
(`program_streams.py`). The minder stands between it and `launch`, adopts its orphans, and holds a pipe from
`launch`: at its end (the launcher is dead) it ends them all. It exits as the command did (128 + n for signal
n).

    SIGTERM  goes on to the command; after the grace everything is killed
    SIGUSR1  sends the command a SIGINT, if no terminal did
    killed -9: the command dies with it (Linux)
Neighbours: `run.py` starts it, `guardian.py` ends processes that it could not. Knows nothing of runs or
machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from launcher.base import descriptor_polling, process_inspection, processes
from launcher.base.log import REDACTOR
from launcher.base.module_command import module_command
from launcher.base.processes import ProcessId
from launcher.console import terminal
from launcher.teardown.program_log import ProgramLog
from launcher.teardown.program_streams import ProgramStreams

GRACE_SECONDS = 5.0
# After the command has ended: the time that its background processes get.
LEFTOVER_SECONDS = 1.0
_SLACK_SECONDS = 10.0
# A process that is not ours and still holds a stream open may be silent for ever: it is looked at so often.
_REST_SECONDS = 0.25
# In the command's environment (run.py puts it there): finds leftover processes after the minder itself was
# killed.
COMMAND_VARIABLE = "LAUNCH_RUN_ID"
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class Command:
    """The launcher's handle on the user's running command. If it goes out of scope, the command is ended."""

    def __init__(
        self, popen: subprocess.Popen[bytes], pipe: int, run_id: str | None, bound_seconds: float
    ) -> None:
        self._bound_seconds = bound_seconds
        self._popen = popen
        self._pipe: int | None = pipe
        self._run_id = run_id
        self.process = ProcessId.of(popen.pid)

    def __del__(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)

    def poll(self) -> int | None:
        """The exit code, as a shell counts it; None while it runs."""
        return self._exit_code(self._popen.poll())

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Wait for the end; None when it still runs after so many seconds."""
        try:
            return self._exit_code(self._popen.wait(timeout=timeout_seconds))
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self) -> None:
        """SIGINT to the command, for when it did not come from the terminal."""
        self._popen.send_signal(signal.SIGUSR1)

    def terminate(self) -> int:
        """End it and all its descendants, within the grace and some seconds; its exit code."""
        self._popen.send_signal(signal.SIGTERM)
        code = self.wait(self._bound_seconds)
        if code is None:
            self._popen.kill()
            code = self.wait()
        assert code is not None  # it was waited for
        return code

    def _exit_code(self, returncode: int | None) -> int | None:
        if returncode is None or returncode >= 0:
            return returncode
        # The minder was killed: the command died with it, the command's children did not.
        run_id = self._run_id
        if run_id is not None:
            processes.end(lambda: process_inspection.with_variable(COMMAND_VARIABLE, run_id), 0)
        return 128 - returncode


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | None = None,
    grace_seconds: float = GRACE_SECONDS,
    keep: Path | None = None,
) -> Command:
    """Start the command under a minder, with this process's standard streams. `keep`: a file that gets its
    output, too."""
    theirs, ours = os.pipe()
    minder = module_command("launcher.teardown.minder")
    options = ["--pipe", str(theirs), "--grace", str(grace_seconds)]
    options += ["--keep", str(keep.absolute())] if keep is not None else []
    # A Ctrl-C while the minder's Python starts would show a traceback: it waits, blocked, until it is caught.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        popen = subprocess.Popen(
            [*minder, *options, "--", *command], env=dict(environ), cwd=cwd, pass_fds=(theirs,)
        )
    except BaseException:  # any error is raised again; the pipe must not stay open
        os.close(ours)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(theirs)
    if keep is not None:
        _tell_secrets(ours)
    return Command(popen, ours, environ.get(COMMAND_VARIABLE), grace_seconds + _SLACK_SECONDS)


def _tell_secrets(pipe: int) -> None:
    """Send the secrets to hide through the pipe: in no command line, environment or file."""
    unsent = memoryview(json.dumps(REDACTOR.spellings).encode() + b"\n")
    with contextlib.suppress(BrokenPipeError):  # it could not start: its exit code tells so
        while unsent:
            unsent = unsent[os.write(pipe, unsent) :]


def main(arguments: Sequence[str]) -> int:
    """Run the command to its end; the exit code."""
    parser = argparse.ArgumentParser(prog="launcher.teardown.minder")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor whose end means: end everything")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds between TERM and KILL")
    parser.add_argument("--keep", type=Path, help="a file for what the command prints")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    processes.adopt_orphans()
    wakeup = _catch_signals()
    parent = os.getpid()
    streams = _kept(options.keep, options.pipe) if options.keep is not None else None
    stdout, stderr = streams.for_command if streams is not None else (None, None)
    try:
        child = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            # The minder has one thread, so Python between fork and exec is safe.
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, parent),
        )
    except OSError as error:
        print(f"launch: {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - as a shell words it
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    if streams is not None:
        streams.begin()  # with threads: from here on nothing is forked
    return _Minder(child, options.pipe, wakeup, options.grace, streams).run()


def _kept(path: Path, pipe: int) -> ProgramStreams:
    """The streams of a command whose output is kept, once the secrets to hide in it are known."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(pipe, 65536)):
        line += piece
    if line.endswith(b"\n"):  # else the launcher is gone, and the command ends at once
        REDACTOR.add_spellings(json.loads(line))
    return ProgramStreams(ProgramLog(path))


def _catch_signals() -> int:
    """Have signals wake us through a descriptor. The command gets the system's defaults back at its exec, but
    keeps ignoring the signals that this process ignores (nohup)."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (
        signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT,
        signal.SIGWINCH,
    ):  # fmt: skip
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # start() blocked it
    return reading


class _Minder:
    """The loop: signals, the pipe, and the command's end."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        pipe: int,
        wakeup: int,
        grace_seconds: float,
        streams: ProgramStreams | None = None,
    ) -> None:
        self._child = child
        self._streams = streams
        self._pipe = pipe
        self._wakeup = wakeup
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run until the command has ended and none of its processes is left. Returns its exit code."""
        waiting = [self._wakeup, self._pipe]
        while self._child.poll() is None:
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            readable = descriptor_polling.wait_readable(waiting, left)
            if self._pipe in readable and not os.read(self._pipe, 4096):
                terminal.reset_rows(sys.stderr.fileno())
                return self._end_all(128 + signal.SIGTERM)
            if self._wakeup in readable:
                self._pass_on(os.read(self._wakeup, 4096))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._grace_seconds = 0
                return self._end_all(128 + signal.SIGKILL)
        code = self._child.returncode
        processes.end(_below, LEFTOVER_SECONDS)
        self._hand_on_the_rest()
        return code if code >= 0 else 128 - code

    def _hand_on_the_rest(self, seconds: float | None = None) -> None:
        """Pass the last output on to its reader, however slow, for `seconds` at most; after a signal, for the
        grace."""
        end_at = self._kill_at if seconds is None else time.monotonic() + seconds
        while self._streams is not None and not self._streams.done():
            if end_at is not None and time.monotonic() > end_at:
                return
            waiting = [self._streams.ended, self._wakeup, self._pipe]
            readable = descriptor_polling.wait_readable(waiting, _REST_SECONDS)
            if seconds is None and self._pipe in readable and not os.read(self._pipe, 4096):
                return
            if self._wakeup in readable and signal.SIGTERM in os.read(self._wakeup, 4096):
                end_at = end_at or time.monotonic() + self._grace_seconds

    def _pass_on(self, received: bytes) -> None:
        if signal.SIGTERM in received and self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            self._child.terminate()
        if signal.SIGUSR1 in received:
            self._child.send_signal(signal.SIGINT)
        if signal.SIGWINCH in received and self._streams is not None:
            self._streams.resize()
            self._child.send_signal(signal.SIGWINCH)  # the terminal's own may have come before the new size
        if signal.SIGCHLD in received:
            self._reap_adopted()

    def _end_all(self, code: int) -> int:
        processes.end(_below, self._grace_seconds)
        self._hand_on_the_rest(_REST_SECONDS)
        return code

    def _reap_adopted(self) -> None:
        """Collect orphans that ended here, but not the command: `Popen` waits for that one. Where there is no
        waitid (macOS, before Python 3.13) nothing is adopted either."""
        if not hasattr(os, "waitid"):
            return
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid == self._child.pid:
                    return
                os.waitpid(found.si_pid, 0)


def _below() -> set[ProcessId]:
    """Everything below this process."""
    own = ProcessId.own()
    return processes.tree({own}) - {own}


def _exit(code: int) -> NoReturn:
    """Without Python's own shutdown: nothing is buffered here, and the user waits."""
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
