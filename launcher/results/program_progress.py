"""How far a program's optimizer has come, and how long it may still take, from `results/grpo.jsonl`.

Neighbours: `client/dspy/report.py` writes the file with each line's time, `run/work.py` shows this in the
live line. A loop of the user's own writes no such file: its number of steps is unknown, and nothing is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from launcher.results.compile_records import JOURNAL
from launcher.results.journals import read_lines

# An estimate is made of the newest steps: answers grow longer or shorter while a policy learns.
_RECENT = 32


@dataclass(frozen=True)
class Progress:
    """`steps`: the number of the run's step that will be the optimizer's last; `remaining`: how many are to
    come. `step_seconds`: the time of one, validations included; None before there are two. `at`: when the
    newest one ended."""

    steps: int
    remaining: int
    step_seconds: float | None = None
    at: float = 0.0

    def seconds_left(self, now: float) -> float | None:
        """At most one step is taken off for the time since the newest one."""
        if self.step_seconds is None or not self.remaining:
            return None
        under_way = min(self.step_seconds, max(0.0, now - self.at))
        return self.step_seconds * self.remaining - under_way


class ProgramProgress:
    """The progress by the file in these results, which is read again when it has grown."""

    def __init__(self, results: Path) -> None:
        self._path = results / JOURNAL
        self._size = -1
        self._progress: Progress | None = None

    def latest(self) -> Progress | None:
        """None without an optimizer."""
        try:
            size = self._path.stat().st_size
            if size != self._size:
                self._progress = progress_of(read_lines(self._path))
                self._size = size
        except OSError:
            return None
        return self._progress


def progress_of(lines: Iterable[Mapping[str, Any]]) -> Progress | None:
    """The progress of the optimizer that has written last."""
    found: dict[str, _Steps] = {}
    newest: _Steps | None = None
    for line in lines:
        version = newest.version if newest is not None else 0
        newest = found.setdefault(str(line.get("compile")), _Steps(version=version))
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            newest.add_line(line)
    return newest.progress() if newest is not None else None


@dataclass
class _Steps:
    """One optimizer's steps. `program_started`: of the program that wrote the newest. `between`: the times
    from each step to the next, and whether it was validated there; a validation takes longer than a step, and
    comes seldom."""

    steps: int | None = None
    done: int = 0
    version: int = 0
    ended: float | None = None
    program_started: float | None = None
    validated: bool = False
    between: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError, ValueError or OverflowError for a line that is not as written."""
        match line["kind"]:
            case "compile":
                self.steps = int(line["steps"])
            case "step":
                self._add_step(line)
            case "validation":
                self.validated = True
            case _:
                pass

    def _add_step(self, line: Mapping[str, Any]) -> None:
        self.done = int(line["step"])  # a rewound one takes some of them again
        self.steps = int(line.get("steps") or self.steps or 0) or None  # another number after a resume
        started = line.get("program_started")
        if line["version"] is not None:
            self.version = int(line["version"])
        # Of a step that was noted later, the end is unknown.
        ended = None if line.get("late") else float(line["time"])
        # The time between two lives of a run is no step's.
        if self.ended is not None and ended is not None and started == self.program_started:
            self.between.append((ended - self.ended, self.validated))
        self.ended, self.program_started, self.validated = ended, started, False

    def progress(self) -> Progress | None:
        if self.steps is None or not self.done:
            return None
        remaining = max(0, self.steps - self.done)
        return Progress(self.version + remaining, remaining, self._step_seconds(), self.ended or 0.0)

    def _step_seconds(self) -> float | None:
        """Of the steps with and without a validation each kind's lower median, by how often there is one: a
        machine that was lost, or a laptop's sleep, makes an interval too long."""
        if not self.between:
            return None
        kinds = [[seconds for seconds, it in self.between if it is kind] for kind in (True, False)]
        return sum(len(kind) * median_low(kind) for kind in kinds if kind) / len(self.between)
