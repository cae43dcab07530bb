"""The alarms of a loop that sends its steps itself (C47): printed once each, and kept for the run's page.

    alarms.jsonl    {"name", "step", "text", "advice", "time"}, in the run's folder

Neighbours: `steps.py` tells it each step that is settled, whichever program trains; `alarms.py` has the
rules. `GRPO` knows more of a step than its status says, and has alarms of its own: it silences these
meanwhile.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from launcher.base.sanitize import one_line as sanitized
from launcher.client.alarms import Alarm, Alarms
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.step_record import StepRecord, StepRollouts

FILE = "alarms.jsonl"
_TRUNCATED = "truncated"
# A step is told again soon, if at all.
_MOST_KNOWN = 256


class StepAlarms:
    """The alarms of one run's steps. `folder`: the run's, if there is one here. Safe to use from several
    threads."""

    def __init__(self, folder: Callable[[], Path | None]) -> None:
        self._folder = folder
        self._alarms = Alarms()
        self._newest = 0
        self._known = deque[str](maxlen=_MOST_KNOWN)
        self._silent = 0
        self._lock = threading.Lock()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Steps that are settled meanwhile raise none here."""
        with self._lock:
            self._silent += 1
        try:
            yield
        finally:
            with self._lock:
                self._silent -= 1

    def report_step(self, status: StepStatus) -> None:
        """A step is settled; it may be told more than once. An empty one may have no number."""
        with self._lock:
            is_known = status.key in self._known
            if self._silent or is_known or not status.metrics:
                return
            self._known.append(status.key)
            self._newest = max(self._newest, status.id)
            raised = self._alarms.observe(_record(status, self._newest))
        for alarm in raised:
            sys.stderr.write(f"slipway: ALARM {alarm.name}: {sanitized(alarm.text)} ({alarm.advice})\n")
            sys.stderr.flush()
            _keep(alarm, self._folder())


def _record(status: StepStatus, step: int) -> StepRecord:
    """What a status says of its rollouts: the length of the trained answers, and how many were cut off."""
    counts = status.counts
    length = counts.sampled_tokens / counts.trained if counts.trained else math.nan
    rollouts = StepRollouts(length=length, cut_off_rate=_cut_off_rate(counts))
    return StepRecord(step, 0, rollouts, status)


def _cut_off_rate(counts: StepCounts) -> float:
    return counts.dropped.get(_TRUNCATED, 0) / counts.samples if counts.samples else math.nan


def _keep(alarm: Alarm, folder: Path | None) -> None:
    line = json.dumps({**asdict(alarm), "time": round(time.time(), 3)})
    if folder is not None and folder.is_dir():
        with suppress(OSError), (folder / FILE).open("a") as file:  # a full disk ends no training
            file.write(f"{line}\n")
