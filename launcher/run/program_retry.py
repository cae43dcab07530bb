"""Runs a program again that failed before its first step, on the endpoint that is already running.

Only on a terminal, where a user may be: Enter runs it again, `q` ends the run, and so does --idle without a
key. The run is watched as ever meanwhile: lease, deadline, budget and signals end it as they would.
Neighbours: `run.py` asks, `work.py` watches, `console/keyboard.py` reads the keyboard.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from launcher.base import clock
from launcher.base.errors import JobFailed
from launcher.base.units import format_duration, format_money
from launcher.console import consent
from launcher.console.keyboard import RawKeyboard
from launcher.console.output import Output
from launcher.records.lease import Limits
from launcher.run.run_request import RunRequest
from launcher.run.runtime_monitor import RuntimeMonitor
from launcher.run.work import Work

_AGAIN, _END = ("\n", "\r"), ("q", "Q", "")
_POLL_SECONDS = 0.25


class ProgramRetry:
    """Decides whether a failed program is run again. `watching`: a watch over the run, without a program."""

    def __init__(
        self, request: RunRequest, label: str, limits: Limits, monitor: RuntimeMonitor,
        watching: Callable[[], Work],
        output: Output,
    ) -> None:  # fmt: skip
        self._request = request
        self._label = label
        self._limits = limits
        self._monitor = monitor
        self._watching = watching
        self._output = output

    def wait_for_key(self, failed: JobFailed) -> bool:
        """Wait for a key if there is a terminal; raises as the run's end does. Without one, the error's hint
        holds an endpoint."""
        if failed.job_exit_code is None or not self._before_its_first_step():
            return False
        if not _is_interactive(self._output, yes=self._request.settings.yes):
            held = "the same line with --name dev and no program holds an endpoint while you mend it"
            failed.hint = f"launch logs {self._label}  # {held}"
            return False
        return self._ask(failed)

    def _before_its_first_step(self) -> bool:
        """Whether no step of this life is committed, nor on its way."""
        self._monitor.poll_now()
        status = self._monitor.latest().status
        resumed = self._request.resumed
        begun_after = resumed.step if resumed is not None else 0
        return status is not None and status.step <= begun_after and not status.steps_queued

    def _ask(self, failed: JobFailed) -> bool:
        idle_seconds = self._request.settings.idle_seconds
        price = self._limits.price_per_hour
        cost = f", which goes on costing {format_money(price)}/h" if price else ""
        work = self._watching()
        with RawKeyboard() as keys:
            waiting = _RetryPrompt(keys, work, idle_seconds)
            self._output.warn(
                f"{failed.message}, before its first step: mend it, and Enter runs it again on the same "
                f"endpoint{cost}; q ends the run, as {format_duration(idle_seconds)} without a key do"
            )
            work.watch_until(waiting.is_over)
        if waiting.again:
            self._output.event("again", "running it again", exit_code=failed.job_exit_code)
        return waiting.again


class _RetryPrompt:
    """Waits for Enter, for the requested end, or for so long without a key."""

    def __init__(self, keys: RawKeyboard, work: Work, idle_seconds: float) -> None:
        self._keys = keys
        self._work = work
        self._idle_seconds = idle_seconds
        self._until = clock.boot_seconds() + idle_seconds
        self.again = False

    def is_over(self) -> bool:
        """A look at the keyboard, a little while long."""
        key = self._keys.read_key(_POLL_SECONDS)
        now = clock.boot_seconds()
        if key is not None:  # a user is there
            self._until = now + self._idle_seconds
        left = self._until - now
        self._work.waits_for = f"Enter: run it again · q: end · {format_duration(max(left, 0))} left"
        self.again = key in _AGAIN
        return self.again or key in _END or left <= 0


def _is_interactive(output: Output, *, yes: bool) -> bool:
    return not yes and not os.environ.get("CI") and consent.can_prompt(output)
