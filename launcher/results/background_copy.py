"""Makes each committed step durable while the run lives, in a thread of its own; at its end, tries again.

Neighbours: `run.py` starts and stops it, `work.py` shows when it falls behind its bound; the machine does the
copying. Training is not slowed: only files that the trainer has finished are read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.base import clock
from launcher.base.errors import LaunchError
from launcher.base.log import LOGGER
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Machine, Progress, PullReport, no_progress

# A look is a few small files; a step takes longer than this.
_POLL_SECONDS = 0.05
# A full disk, or a checkpoint that is not whole, is not another one for being looked at again at once.
_BACKOFF_SECONDS = 5.0
_STOP_SECONDS = 30.0
# Between two attempts to bring home the results that were left behind at the end.
_RETRY_SECONDS = 10.0


class BackgroundCopy:
    """Copies the committed steps of `machine` until `stop`; `now()` is the run's current durability."""

    def __init__(self, machine: Machine, results: Path, look_every_seconds: float = _POLL_SECONDS) -> None:
        self._machine = machine
        self._results = results
        self._look_every_seconds = look_every_seconds
        self._durability = DurabilityStatus()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background-copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop copying; nothing is copied after this returns, unless a disk has stood still for very long. A
        copy in progress is interrupted: the next pull goes on from the downloaded part, at full speed."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def latest(self) -> DurabilityStatus:
        """The durability at the last look."""
        return self._durability

    def _run(self) -> None:
        pause = self._look_every_seconds
        while not self._over.wait(pause):
            pause = self._look_every_seconds
            before = self._durability
            try:
                self._durability = self._machine.make_durable(self._results, self._over.is_set)
                if self._durability.trouble and self._durability == before:
                    pause = max(pause, _BACKOFF_SECONDS)
            except LaunchError as error:
                self._report_failure(f"{error.message} ({error.why})")
                pause = max(pause, _BACKOFF_SECONDS)
            except Exception as error:  # noqa: BLE001 - if this thread ended, nothing would be durable, unnoticed
                self._report_failure(f"{type(error).__name__}: {error}")
                pause = max(pause, _BACKOFF_SECONDS)

    def _report_failure(self, reason: str) -> None:
        if self._durability.trouble != reason:
            LOGGER.warning("not durable: %s", reason)
        self._durability = replace(self._durability, trouble=reason)
        with contextlib.suppress(Exception):  # a machine that does not answer: the last known state stays
            self._durability = replace(self._durability, committed=self._machine.committed())


def pull_with_retries(
    machine: Machine,
    results: Path,
    seconds: float,
    given_up: Callable[[], bool],
    progress: Progress = no_progress,
) -> PullReport | None:
    """Pull again and again for at most `seconds`, asleep or awake; None if it never succeeded."""
    bound = clock.boot_seconds() + seconds

    def over() -> bool:
        return clock.boot_seconds() >= bound or given_up()

    while clock.boot_seconds() < bound:
        again = clock.boot_seconds() + _RETRY_SECONDS
        while clock.boot_seconds() < min(again, bound):
            if given_up():
                return None
            time.sleep(_POLL_SECONDS)
        try:
            return machine.pull(results, progress, over)
        except Exception as error:  # noqa: BLE001 - a full disk here is mended like a lost network
            LOGGER.warning("not pulled: %s", error.why if isinstance(error, LaunchError) else repr(error))
    return None
