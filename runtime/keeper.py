"""The process that ends the runtime when its lease is not renewed, at its deadline, or at a signal.

    python -m runtime.keeper --config STATE/runtime.json [--autodown [DATABASE]]
                                                           (the token on the first line of stdin)

It is the parent of the supervisor and adopts every orphan below, so that no kill leaves a process behind. The
supervisor ends its children when the keeper dies (death signal); the keeper ends the children of a dead
supervisor. Shares nothing with the runtime but files and signals: standard library only. On a rented machine
it also resets the timer that would end the machine (`autodown.py`), as long as no limit is reached and the
runtime answers: a frozen runtime, or this process gone, ends the machine. There it also keeps room on the
disk for its own writes (`ballast.py`).

- `lease`: its mtime *changing* renews the lease, counted on this process's monotonic clock, which stands
  still while the computer sleeps. The deadline counts on the boot clock, which does not.
- `keeper.json`: {"state": "running"|"ended",
  "reason": null|"lease"|"deadline"|"signal"|"supervisor exited", …}
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime import autodown
from runtime.ballast import Ballast
from runtime.shared import json_files, process_table, processes
from runtime.shared.stdin_token import read_token

# The time that the supervisor gets for an orderly end (it saves between two steps) before everything is
# killed.
GRACE_SECONDS = 75.0
ORPHAN_SECONDS = 10.0
_TICK_SECONDS = 0.2
# To find an orphan is to look at every process of the machine.
_ORPHANS_EVERY_SECONDS = 1.0
_BALLAST_EVERY_SECONDS = 60.0
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run: seconds without a renewal, seconds in all (None: no deadline)."""

    lease_seconds: float
    deadline_seconds: float | None


class Lease:
    """The time since the lease file last changed, by our own clock: the file's clock may be another
    computer's."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._seen = self._stamp()
        self._renewed_at = time.monotonic()

    def left_seconds(self) -> float:
        """Seconds until it runs out; negative when it has."""
        now = self._stamp()
        if now is not None and now != self._seen:
            self._seen = now
            self._renewed_at = time.monotonic()
        return self._seconds - (time.monotonic() - self._renewed_at)

    def _stamp(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


class Keeper:
    """Runs the supervisor `command` under the limits; `run` returns the exit code."""

    def __init__(
        self,
        state_dir: Path,
        limits: RunLimits,
        command: list[str],
        grace_seconds: float = GRACE_SECONDS,
        timer: autodown.AutostopTimer | None = None,
        ballast: Ballast | None = None,
    ) -> None:
        self._state_dir = state_dir
        # A run on the user's own computer lays nothing on its disk.
        self._lays_ballast = ballast is not None
        self._ballast = ballast or Ballast(state_dir)
        self._limits = limits
        self._command = command
        self._grace_seconds = grace_seconds
        self._timer = timer
        self._supervisor = 0
        self._exit_code: int | None = None

    def run(self, token: bytes) -> int:
        """Run until the supervisor ends, by itself (1) or because a limit or a signal ended the run (0)."""
        processes.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._start(token)
            reason = self._watch()
            self._log(f"ending: {reason}")
            self._end()
        finally:
            left = processes.kill_descendants()
            self._ballast.release_all()  # nothing here fills the disk any more: the copy home needs room
        self._record("ended", reason, left)
        self._log(f"ended: {reason}; supervisor's exit code {self._exit_code}; left: {left or 'nothing'}")
        return 1 if reason == "supervisor exited" or left else 0

    def _start(self, token: bytes) -> None:
        supervisor = processes.spawn(
            self._command,
            death_signal=signal.SIGTERM,
            log=self._state_dir / "logs" / "supervisor.log",
            stdin=subprocess.PIPE,
        )
        self._supervisor = supervisor.pid
        if supervisor.stdin is not None:
            supervisor.stdin.write(token + b"\n")
            supervisor.stdin.close()
        self._record("running", None, [])
        self._log(f"supervisor {supervisor.pid} started; limits {self._limits}")

    def _watch(self) -> str:
        """Wait for the reason to end the run."""
        lease = Lease(self._state_dir / "lease", self._limits.lease_seconds)
        deadline = self._limits.deadline_seconds
        ends_at = None if deadline is None else _boot_seconds() + deadline
        orphans_at = ballast_at = 0.0
        while True:
            received = signal.sigtimedwait(_SIGNALS, _TICK_SECONDS)
            self._reap()
            if self._exit_code is not None:
                return "supervisor exited"
            if received is not None and received.si_signo != signal.SIGCHLD:
                return "signal"
            if lease.left_seconds() <= 0:
                return "lease"
            if ends_at is not None and _boot_seconds() >= ends_at:
                return "deadline"
            if time.monotonic() >= orphans_at:
                self._end_orphans()
                orphans_at = time.monotonic() + _ORPHANS_EVERY_SECONDS
            if self._lays_ballast and time.monotonic() >= ballast_at:
                self._ballast.fill()
                ballast_at = time.monotonic() + _BALLAST_EVERY_SECONDS
            if self._timer is not None and (message := self._timer.tick()) is not None:
                self._log(message)

    def _end(self) -> None:
        """SIGTERM and a bounded wait: the supervisor ends its children in order."""
        processes.signal_process(self._supervisor, signal.SIGTERM)
        self._wait_until(lambda: self._exit_code is not None, self._grace_seconds)
        # Children of a supervisor that was killed got their death signal and are ending by themselves.
        self._wait_until(lambda: not process_table.descendants(os.getpid()), ORPHAN_SECONDS)

    def _wait_until(self, done: Callable[[], bool], bound_seconds: float) -> None:
        end = time.monotonic() + bound_seconds
        while not done() and time.monotonic() < end:
            signal.sigtimedwait((signal.SIGCHLD,), 0.1)
            self._reap()

    def _end_orphans(self) -> None:
        """Kill processes that lost their parent: only a tether killed by force leaves any behind."""
        for pid in process_table.children(os.getpid()):
            if pid != self._supervisor:
                for lost in (*process_table.descendants(pid), pid):
                    processes.signal_process(lost, signal.SIGKILL)

    def _reap(self) -> None:
        ended = processes.reap()
        if self._supervisor in ended:
            self._exit_code = ended[self._supervisor]

    def _record(self, state: str, reason: str | None, left: list[int]) -> None:
        fields = {
            "state": state,
            "reason": reason,
            "pid": os.getpid(),
            "supervisor_pid": self._supervisor,
            "supervisor_exit_code": self._exit_code,
            "left": left,
            "time": time.time(),
        }
        path = self._state_dir / "keeper.json"
        self._ballast.write(lambda: json_files.write_json(path, fields, durable=True))

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a line of a log is no reason to end a run
            self._ballast.write(lambda: self._append(text))

    def _append(self, text: str) -> None:
        with open(self._state_dir / "logs" / "keeper.log", "a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="runtime.keeper", description="Ends the runtime when it must end.")
    parser.add_argument("--config", required=True, help="state_dir/runtime.json")
    parser.add_argument(
        "--autodown", nargs="?", const=autodown.DATABASE, help="a machine that skylet ends: its database"
    )
    options = parser.parse_args(arguments)
    config_path = Path(options.config).resolve()
    config = json.loads(config_path.read_text())
    state_dir = Path(config["state_dir"])
    (state_dir / "logs").mkdir(parents=True, exist_ok=True)
    token = read_token()
    if not token:
        print("keeper: no token on the first line of stdin", file=sys.stderr)  # noqa: T201 - its one message
        return 2
    # The configuration's own defaults are the schema's; this file reads its own part without pydantic.
    limits = RunLimits(float(config.get("lease_seconds", 60.0)), config.get("deadline_seconds"))
    command = [sys.executable, "-m", "runtime", "--config", str(config_path)]
    timer = ballast = None
    if options.autodown is not None:
        ballast = Ballast(state_dir)
        answering = autodown.RuntimeLiveness(state_dir, Path(config["socket_dir"]))
        database = Path(os.path.expanduser(options.autodown))
        timer = autodown.AutostopTimer(database, answering, make_room=ballast.release)
    return Keeper(state_dir, limits, command, timer=timer, ballast=ballast).run(token)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
