"""The work phase of a run: the program runs or the endpoint is held, and the run is watched.

Neighbours: `run.py` calls `do` and acts on its result; `teardown/minder.py` holds the user's program,
`runtime_monitor.py` has the runtime's state. Takes nothing down.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.base import clock
from launcher.base.errors import JobFailed, LimitReached
from launcher.console.output import LiveStatus, Output
from launcher.records.lease import LONGER_LIMIT_HINT, Limits
from launcher.results.program_progress import Progress
from launcher.run.runtime_monitor import RuntimeMonitor, RuntimeSnapshot
from launcher.run.signals import Interrupted
from launcher.teardown.minder import GRACE_SECONDS, Command
from launcher.types.durability import DurabilityStatus
from runtime.shared.statuses import NOT_COMMITTED, RuntimeStatus

_POLL_SECONDS = 0.25
_DRAW_EVERY_SECONDS = 1.0
# A program that got the same Ctrl-C as we did has its grace to end by itself; if the signal did not come from
# the terminal the program may have missed it, and gets it after a moment.
_MISSED_SECONDS = 1.0


@dataclass(frozen=True)
class WatchedRun:
    """The inputs of the watch loop. `ended` asks the machine why the runtime is gone, `durability` is its
    progress, `progress` the program's; `grace_seconds` is the program's time to save its state when the run
    is interrupted; `timeout_budget_seconds` is how long the runtime may be silent (`timeout_budget.py`).
    `begun_at` and the limits are on the clock that counts sleep (`base/clock.py`)."""

    label: str
    begun_at: float
    limits: Limits
    monitor: RuntimeMonitor
    ended: Callable[[], str | None]
    durability: Callable[[], DurabilityStatus]
    timeout_budget_seconds: float
    grace_seconds: float = GRACE_SECONDS
    progress: Callable[[], Progress | None] = lambda: None


class Work:
    """One program, or None to hold the endpoint until a signal. `text` is the program's command line."""

    def __init__(self, watched: WatchedRun, program: Command | None, text: str, output: Output) -> None:
        self._watched = watched
        self._program = program
        self._text = text
        self._output = output
        self._late = False
        self._disk_waits = False
        self._detail: str | None = None
        # The prompt in the live line while a key is waited for.
        self.waits_for: str | None = None
        self._warned: set[str] = set()

    def run(self) -> None:
        """Run until the program has ended, for any reason.

        Raises JobFailed when it or the runtime failed, LimitReached, Interrupted.
        """
        try:
            with self._output.shared_terminal(self._program is not None):
                self._watch(self._program_is_over)
        except Interrupted as interrupted:
            if self._program is not None and interrupted.number == signal.SIGINT:
                self._let_end(self._program)
            raise
        finally:
            if self._program is not None and self._program.poll() is None:
                self._program.terminate()

    def watch_until(self, over: Callable[[], bool]) -> None:
        """Watch until `over`, which blocks briefly each time. Raises as `run`."""
        try:
            self._watch(over)
        finally:
            self._output.release_terminal()

    def _watch(self, over: Callable[[], bool]) -> None:
        drawn_at = 0.0
        while True:
            now = clock.boot_seconds()
            snapshot = self._watched.monitor.latest()
            if now - drawn_at >= _DRAW_EVERY_SECONDS:
                self._output.update_status(self._live(snapshot, now))
                drawn_at = now
            if over():
                return
            self._check_limits(now)
            self._check_runtime(snapshot)
            self._report_detail(snapshot)
            self._report_warnings(snapshot)
            self._report_disk(snapshot)
            self._check_durable(self._watched.durability())

    def _program_is_over(self) -> bool:
        """Look for a little while. Raises JobFailed when it has failed."""
        code = self._wait()
        if code is not None:
            self._check_program(code)
        return code is not None

    def _wait(self) -> int | None:
        """A little while; the program's exit code if it has ended."""
        if self._program is None:
            time.sleep(_POLL_SECONDS)
            return None
        return self._program.wait(_POLL_SECONDS)

    def _check_program(self, code: int) -> None:
        if code == 0 or self._program is None:
            return
        raise JobFailed(
            f"the program ended with exit code {code}{_by_signal(code)}",
            self._text,
            f"launch logs {self._watched.label}",
            job_exit_code=code,
        )

    def _check_limits(self, now: float) -> None:
        if reached := self._watched.limits.reached(now):
            raise LimitReached(reached, "the run ends here; its results are kept", LONGER_LIMIT_HINT)

    def _check_runtime(self, snapshot: RuntimeSnapshot) -> None:
        label = self._watched.label
        if snapshot.status is not None and snapshot.status.phase == "failed":
            failed = next((child for child in snapshot.status.children if child.state == "failed"), None)
            which = failed.name if failed else "supervisor"
            why = (failed.detail if failed else None) or snapshot.status.detail
            raise JobFailed("the runtime failed", why, f"launch logs {label} --which {which}")
        if snapshot.silent_since is None:
            return
        hint = f"launch logs {label} --which supervisor"
        if reason := self._watched.ended():
            raise JobFailed("the runtime ended by itself", reason, hint)
        if time.monotonic() - snapshot.silent_since > self._watched.timeout_budget_seconds:
            raise JobFailed("the runtime no longer answers", snapshot.silence, hint)

    def _report_detail(self, snapshot: RuntimeSnapshot) -> None:
        """Report once why the runtime does not serve its newest step, and when that is over."""
        if snapshot.status is None:
            return
        detail = snapshot.status.detail if snapshot.status.phase == "degraded" else None
        if detail and detail != self._detail:
            self._output.warn(detail)
        if self._detail and not detail:
            self._output.event(
                "served", "the newest step is being served again", version=snapshot.status.version
            )
        self._detail = detail

    def _report_warnings(self, snapshot: RuntimeSnapshot) -> None:
        """Report each warning once."""
        for line in snapshot.status.warnings if snapshot.status else ():
            if line not in self._warned:
                self._warned.add(line)
                self._output.warn(line)

    def _report_disk(self, snapshot: RuntimeSnapshot) -> None:
        """Report once that the machine's disk takes nothing, and when that is over."""
        if snapshot.status is None:
            return
        error = _disk_error(snapshot.status)
        if error and not self._disk_waits:
            self._output.warn(f"the machine's disk takes nothing, so steps wait: {error}")
        if self._disk_waits and not error:
            self._output.event("disk", "the machine's disk takes data again: steps go on")
        self._disk_waits = error is not None

    def _check_durable(self, durability: DurabilityStatus) -> None:
        """Report once when the machine's loss would cost more steps than the bound, and when that is over."""
        late = durability.steps_behind > durability.bound_steps
        if late and not self._late:
            why = f": {durability.trouble}" if durability.trouble else ""
            self._output.warn(f"copying checkpoints falls behind: {durability.describe()}{why}")
        if self._late and not late:
            self._output.event(
                "durable", f"copying caught up: {durability.describe()}", **durability.to_dict()
            )
        self._late = late

    def _live(self, snapshot: RuntimeSnapshot, now: float) -> LiveStatus:
        status = snapshot.status
        silent = None if snapshot.silent_since is None else time.monotonic() - snapshot.silent_since
        trouble = _runtime_problem(status) if status else None
        progress = self._watched.progress()
        return LiveStatus(
            name=self._watched.label,
            up_seconds=now - self._watched.begun_at,
            cost=self._watched.limits.spent + self._watched.limits.cost(now),
            budget=self._watched.limits.budget,
            step=status.step if status else None,
            steps=progress.steps if progress else None,
            seconds_left=progress.seconds_left(time.time()) if progress else None,
            reward=reward_of(status.last_metrics) if status else None,
            tunnel_ms=None if snapshot.round_trip_seconds is None else snapshot.round_trip_seconds * 1000,
            lease_left_seconds=snapshot.lease.left(now),
            trouble=trouble if silent is None else f"no answer for {silent:.0f} s",
            waits_for=self.waits_for,
        )

    def _let_end(self, program: Command) -> None:
        """After an interruption: let the program save its state."""
        if not _in_foreground() and program.wait(_MISSED_SECONDS) is None:
            program.interrupt()
        program.wait(self._watched.grace_seconds)


def _runtime_problem(status: RuntimeStatus) -> str | None:
    """The live line's problem of a runtime: a restart, slowness, a version not served. None: all is well."""
    if _disk_error(status):
        return "the machine's disk takes nothing: steps wait"
    again = [child.name for child in status.children if child.state == "restarting"]
    if again:
        return f"{', '.join(again)} {'is' if len(again) == 1 else 'are'} restarting"
    detailed = [child for child in status.children if child.state == "ready" and child.detail]
    if detailed:
        return f"{detailed[0].name} {detailed[0].detail}"
    if status.phase != "degraded":
        return None
    return "the newest step is not being served" if status.detail else "a part of the runtime is not ready"


def _disk_error(status: RuntimeStatus) -> str | None:
    """The error of the machine's disk, while the gateway cannot store a step or the trainer cannot commit."""
    details = [child.detail or "" for child in status.children]
    waits = next((detail for detail in details if detail.startswith(NOT_COMMITTED)), None)
    return status.disk or waits


def _by_signal(code: int) -> str:
    try:
        return f" ({signal.Signals(code - 128).name})"
    except ValueError:
        return ""


def _in_foreground() -> bool:
    """Whether our terminal sends its Ctrl-C to us, and so to the program, which is in our group."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def reward_of(metrics: dict[str, float]) -> float | None:
    """The mean reward of the newest step."""
    return metrics.get("reward")
