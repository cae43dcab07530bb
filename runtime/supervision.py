"""Keeps a set of children running: start all at once but those that wait, restart with back-off and a bound,
end in order.

Neighbours: __main__.py lists the children; health.py checks each one; tether.py runs each one. State goes to
`supervisor.json` on each change. Serves no HTTP, starts no thread (it forks).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime import gpus, tether
from runtime.cpu_activity import CpuActivity
from runtime.health import HealthCheck
from runtime.shared import failpoints, json_files, processes
from runtime.shared.log_errors import final_error
from runtime.shared.statuses import ChildState

# Secrets that this process may have been given for one of its children.
SECRETS = frozenset({"HF_TOKEN", "WANDB_API_KEY"})
log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_CHECK_EVERY_SECONDS = 0.5
# The gateway reports a supervisor whose file has not changed for several times as long.
_HEARTBEAT_SECONDS = 5.0
# A check that takes longer is worth a word, though not yet a restart: of a child that is at work the word is
# that it is slow, and comes later where its own answers have taken long before; in time (test_bounds.py).
SLOW_SECONDS = 10.0
MAX_SLOW_SECONDS = 13.0
_SLOW_FACTOR = 3.0
# Before that, the check whether it is at work is not made.
_STALL_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class ChildSpec:
    """One child: its command, its health check, and its time limits."""

    name: str
    command: list[str]
    log: Path
    check: HealthCheck
    # First line of its standard input (the token); None: /dev/null.
    stdin_line: bytes | None = None
    start_seconds: float = 1800.0
    # How long the check may fail, once it has succeeded, before that is reported; the second: before the
    # child is ended and started again.
    unresponsive_seconds: float = 10.0
    unhealthy_seconds: float = 30.0
    stop_seconds: float = 10.0
    # Lower ranks are ended first; equal ranks together.
    stop_rank: int = 0
    # Without it the runtime cannot answer anything: when it fails for good, the supervisor ends.
    is_vital: bool = False
    # Which of the run's secrets it needs; the others are kept from it.
    secrets: frozenset[str] = frozenset()
    # The GPUs it sees; None: not set.
    gpus: list[str] | None = None
    # It is started once these are ready for the first time, because they measure memory that must not change
    # meanwhile.
    starts_after: frozenset[str] = frozenset()

    def environ(self) -> dict[str, str]:
        """The child's environment."""
        kept = SECRETS - self.secrets
        environ = {name: value for name, value in os.environ.items() if name not in kept}
        return environ if self.gpus is None else environ | {gpus.VISIBLE: ",".join(self.gpus)}


@dataclass(frozen=True)
class RestartPolicy:
    """Back-off and bound. A child that was well for `settled_seconds` starts with a clean sheet."""

    max_restarts: int = 4
    initial_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0
    settled_seconds: float = 120.0

    def backoff_seconds(self, failures: int) -> float:
        return min(self.max_backoff_seconds, self.initial_backoff_seconds * 2.0 ** (failures - 1))


@dataclass
class Child:
    """A child as it is now. Only its own task changes it."""

    spec: ChildSpec
    state: ChildState = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    # While it gives no answer: "slow", at work on it, so that nothing is wrong; or "still".
    stall: Literal["slow", "still"] | None = None

    def __post_init__(self) -> None:
        self.state = ChildState(name=self.spec.name, state="starting")

    @property
    def has_problem(self) -> bool:
        """Whether it runs, and yet has a problem to report."""
        return self.is_notable and self.stall != "slow"

    @property
    def is_notable(self) -> bool:
        """Whether it runs, and has a note to report."""
        return self.state.state == "ready" and self.state.detail is not None


class Supervisor:
    """Owns the children from start to end."""

    def __init__(
        self, state_dir: Path, specs: list[ChildSpec], restarts: RestartPolicy | None = None
    ) -> None:
        self._path = state_dir / "supervisor.json"
        self._children = [Child(spec) for spec in specs]
        self._restarts = restarts or RestartPolicy()
        self._stopping = False
        self._was_ready = {spec.name: asyncio.Event() for spec in specs}
        self._failed_for_good = asyncio.Event()
        self._detail: str | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop` is set (0) or a vital child fails for good (1); then end the children by rank."""
        self._write()
        tasks = [asyncio.create_task(self._supervise(child)) for child in self._children]
        tasks.append(asyncio.create_task(self._heartbeat()))
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(self._failed_for_good.wait())]
        try:
            await asyncio.wait([*waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # none of them ends by itself: raise its error
        finally:
            self._stopping = True
            self._write()
            failpoints.failpoint("supervisor.stopping")
            for task in (*tasks, *waits):
                task.cancel()
            await asyncio.gather(*tasks, *waits, return_exceptions=True)
            for rank in sorted({child.spec.stop_rank for child in self._children}):
                await asyncio.gather(*(self._stop(c) for c in self._children if c.spec.stop_rank == rank))
                failpoints.failpoint("supervisor.stopped")
        return 1 if self._failed_for_good.is_set() else 0

    async def _heartbeat(self) -> None:
        """A sign of life, for ever."""
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            self._write()

    async def _supervise(self, child: Child) -> None:
        """Start the child, watch it, start it again: for ever, or until it has failed too often."""
        failures = 0
        await asyncio.gather(*(self._was_ready[name].wait() for name in child.spec.starts_after))
        while True:
            started = self._start(child)
            trouble, well_seconds = await self._watch(child)
            failpoints.failpoint("supervisor.noticed")
            await self._end(child, by_force=True)
            failures = 1 if well_seconds >= self._restarts.settled_seconds else failures + 1
            detail = f"{trouble}; last log lines: " + " | ".join(final_error(child.spec.log))
            if failures > self._restarts.max_restarts:
                self._fail(child, f"failed {failures} times in a row: {detail}")
                await asyncio.Event().wait()  # stays failed until the supervisor ends
            self._set(child, state="restarting", pid=None, restarts=child.state.restarts + 1, detail=detail)
            failpoints.failpoint("supervisor.restarting")
            wait_seconds = self._restarts.backoff_seconds(failures)
            await asyncio.sleep(max(0.0, wait_seconds - (time.monotonic() - started)))

    def _start(self, child: Child) -> float:
        spec = child.spec
        spec.check.reset()
        process = processes.spawn(
            tether.command(spec.command, spec.stop_seconds),
            death_signal=signal.SIGTERM,
            log=spec.log,
            stdin=subprocess.DEVNULL if spec.stdin_line is None else subprocess.PIPE,
            environ=spec.environ(),
        )
        failpoints.failpoint("supervisor.spawned")
        if process.stdin is not None and spec.stdin_line is not None:
            process.stdin.write(spec.stdin_line + b"\n")
            process.stdin.close()
        child.process = process
        state = "starting" if child.state.restarts == 0 else "restarting"
        self._set(child, state=state, pid=None)
        failpoints.failpoint("supervisor.started")
        return time.monotonic()

    async def _watch(self, child: Child) -> tuple[str, float]:
        """Wait for a failure: returns it, and for how many seconds the child had been well."""
        spec, process = child.spec, child.process
        assert process is not None
        started = well_at = time.monotonic()
        ready_at: float | None = None
        check: asyncio.Task[str | None] | None = None
        next_check = started
        computing: CpuActivity | None = None
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                now = time.monotonic()
                code = process.poll()
                if code is not None:
                    return f"ended with exit code {code}", 0.0 if ready_at is None else now - ready_at
                if check is None and now >= next_check:
                    pid = child.state.pid or tether.held_by(process.pid)
                    if pid is None:  # the tether itself is still starting
                        continue
                    if child.state.pid is None:
                        self._set(child, pid=pid)
                    check = asyncio.create_task(spec.check(pid))
                if check is not None and not check.done():
                    if now - next_check > _STALL_POLL_SECONDS and child.state.pid is not None:
                        computing = computing or CpuActivity(child.state.pid)
                        self._report_stall(child, now - next_check, computing)
                elif check is not None and check.done():
                    computing = None
                    trouble, check, next_check = check.result(), None, now + _CHECK_EVERY_SECONDS
                    if trouble is None:
                        well_at = now
                        if ready_at is None:
                            ready_at = now
                        if child.state.state != "ready" or child.state.detail != spec.check.note:
                            failpoints.failpoint("supervisor.ready")
                            self._set(child, state="ready", detail=spec.check.note)
                            self._was_ready[spec.name].set()
                    elif ready_at is None and now - started > spec.start_seconds:
                        return f"not ready after {now - started:.0f} s: {trouble}", 0.0
                    elif ready_at is not None and now - well_at > spec.unhealthy_seconds:
                        return f"sick for {now - well_at:.0f} s: {trouble}", now - ready_at
                    elif ready_at is not None and now - well_at > spec.unresponsive_seconds:
                        self._set(child, detail=f"not well for {now - well_at:.0f} s: {trouble}")
        finally:
            if check is not None:
                check.cancel()

    def _report_stall(self, child: Child, seconds: float, computing: CpuActivity) -> None:
        """Report a check that takes long: the child is slow, or it stands still."""
        usual = _SLOW_FACTOR * child.spec.check.usual_seconds
        if seconds <= SLOW_SECONDS or (child.state.detail is not None and child.stall is None):
            return
        found: Literal["slow", "still"] = "slow" if computing else "still"
        if found == child.stall or (found == "slow" and seconds <= min(usual, MAX_SLOW_SECONDS)):
            return
        words = {
            "slow": f"is slow: at work for {seconds:.0f} s without an answer",
            "still": f"has not answered for {seconds:.0f} s",
        }
        self._set(child, silence=found, detail=words[found])

    async def _end(self, child: Child, *, by_force: bool = False) -> None:
        """SIGTERM, a bounded wait, SIGKILL. The tether ends everything below the child.

        `by_force` at once: one that stands still would not take the time to end well.
        """
        process = child.process
        if process is None:
            return
        if by_force and process.poll() is None and (pid := tether.held_by(process.pid)) is not None:
            processes.signal_process(pid, signal.SIGKILL)
        end = time.monotonic() + child.spec.stop_seconds + 5.0
        processes.signal_process(process.pid, signal.SIGTERM)
        while process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(0.02)
        child.process = None

    async def _stop(self, child: Child) -> None:
        await self._end(child)
        self._set(child, state="stopped", pid=None)

    def _fail(self, child: Child, detail: str) -> None:
        self._set(child, state="failed", pid=None, detail=detail)
        if child.spec.is_vital:
            self._failed_for_good.set()

    def _set(self, child: Child, silence: Literal["slow", "still"] | None = None, **changes: object) -> None:
        child.stall = silence
        child.state = child.state.model_copy(update=changes)
        self._write()

    def _phase(self) -> str:
        states = {child.state.state for child in self._children}
        if self._stopping:
            return "stopping"
        if "failed" in states:
            return "failed"
        if "restarting" in states or any(child.has_problem for child in self._children):
            return "degraded"
        return "ready" if states <= {"ready"} else "starting"

    def _write(self) -> None:
        worth_a_word = [
            child.state for child in self._children if child.state.state == "failed" or child.is_notable
        ]
        status = {
            "phase": self._phase(),
            "pid": os.getpid(),
            "children": [child.state.model_dump() for child in self._children],
            "detail": "; ".join(f"{state.name} {state.detail}" for state in worth_a_word) or None,
        }
        try:
            json_files.write_json(self._path, status)
        except OSError as error:  # a full disk must not cost the children their supervisor
            log.warning("%s: %s", self._path.name, error)


def stop_on(signals: tuple[signal.Signals, ...], on_stop: Callable[[], None]) -> None:
    """Call `on_stop` in the running loop when one of the signals arrives."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, on_stop)
