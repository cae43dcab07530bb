"""A program that failed before its first step is mended and run again, on the endpoint that is up already.

On a terminal only, where somebody may be: Enter runs it again, `q` ends the run, and so does --idle without a
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
from launcher.run.pulse import Pulse
from launcher.run.request import Request
from launcher.run.work import Work

_AGAIN, _END = ("\n", "\r"), ("q", "Q", "")
_LOOK_SECONDS = 0.25


class AnotherTry:
    """Whether a failed program is run again. `watching`: a watch over the run, with no program in it."""

    def __init__(
        self, request: Request, label: str, limits: Limits, pulse: Pulse, watching: Callable[[], Work],
        output: Output,
    ) -> None:  # fmt: skip
        self._request = request
        self._label = label
        self._limits = limits
        self._pulse = pulse
        self._watching = watching
        self._output = output

    def wanted(self, failed: JobFailed) -> bool:
        """Wait for a key where one can come; raises as the run's end does. Where none can, the error says how
        to hold an endpoint."""
        if failed.job_exit_code is None or not self._before_its_first_step():
            return False
        if not _somebody_answers(self._output, yes=self._request.settings.yes):
            held = "the same line with --name dev and no program holds an endpoint while you mend it"
            failed.hint = f"launch logs {self._label}  # {held}"
            return False
        return self._asked(failed)

    def _before_its_first_step(self) -> bool:
        """Whether no step of this life is committed, nor on its way."""
        self._pulse.look()
        status = self._pulse.now().status
        resumed = self._request.resumed
        begun_after = resumed.step if resumed is not None else 0
        return status is not None and status.step <= begun_after and not status.steps_queued

    def _asked(self, failed: JobFailed) -> bool:
        idle_seconds = self._request.settings.idle_seconds
        price = self._limits.price_per_hour
        cost = f", which goes on costing {format_money(price)}/h" if price else ""
        work = self._watching()
        with RawKeyboard() as keys:
            waiting = _Waiting(keys, work, idle_seconds)
            self._output.warn(
                f"{failed.message}, before its first step: mend it, and Enter runs it again on the same "
                f"endpoint{cost}; q ends the run, as {format_duration(idle_seconds)} without a key do"
            )
            work.stand_by(waiting.over)
        if waiting.again:
            self._output.event("again", "running it again", exit_code=failed.job_exit_code)
        return waiting.again


class _Waiting:
    """Until Enter, the end that is asked for, or so long without a key."""

    def __init__(self, keys: RawKeyboard, work: Work, idle_seconds: float) -> None:
        self._keys = keys
        self._work = work
        self._idle_seconds = idle_seconds
        self._until = clock.boot_seconds() + idle_seconds
        self.again = False

    def over(self) -> bool:
        """A look at the keyboard, a little while long."""
        key = self._keys.read_key(_LOOK_SECONDS)
        now = clock.boot_seconds()
        if key is not None:  # somebody is there
            self._until = now + self._idle_seconds
        left = self._until - now
        self._work.waits_for = f"Enter: run it again · q: end · {format_duration(max(left, 0))} left"
        self.again = key in _AGAIN
        return self.again or key in _END or left <= 0


def _somebody_answers(output: Output, *, yes: bool) -> bool:
    return not yes and not os.environ.get("CI") and consent.can_prompt(output)
