"""An optimizer's report: every rollout is trained or counted with its reason.

Neighbours: `training.py` hands it the record of each step, `held_out.py` each validation. Writes lines to
stderr, and `grpo.jsonl` into the run's folder: of all compiles, each line with its compile's id. Knows
nothing of the training itself.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from launcher.base.layout import fit, terminal_width
from launcher.base.sanitize import plain_text as sanitized
from launcher.client.alarms import Alarm
from launcher.client.dspy.grouping import GroupingResult
from launcher.client.dspy.training_place import Place, Validated
from launcher.client.schema import StepCounts
from launcher.client.step_record import StepRecord


@dataclass
class Report:
    """Totals over all steps of one `compile`. A dropped sample has the reason it was dropped for."""

    steps: int = 0
    empty_steps: int = 0
    rollouts: int = 0
    groups: int = 0
    members: int = 0
    samples: int = 0
    trained: int = 0
    sampled_tokens: int = 0
    retokenised: int = 0
    turns_joined: int = 0
    sealed: int = 0
    groups_without_variance: int = 0
    rollouts_without_calls: int = 0
    calls_outside_rollouts: int = 0
    calls_truncated: int = 0
    rewinds: int = 0
    # Dynamic sampling: made besides a step's own, for examples without variance.
    groups_again: int = 0
    rollouts_again: int = 0
    # Left out, as they had become older than `staleness` allows.
    groups_stale: int = 0
    rollouts_stale: int = 0
    # Begun and in no step: the training ended before, or the machine was lost.
    rollouts_unused: int = 0
    # Steps that had all their rollouts more, and still examples without variance.
    short_steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    # Failures of other models and of judges, by the model's name.
    outside: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)

    def add_rollouts(self, grouped: GroupingResult) -> None:
        self.rollouts += grouped.outcomes.total()
        self.outcomes += grouped.outcomes
        self.outside += grouped.external_failures
        self.rollouts_without_calls += grouped.without_calls
        self.calls_truncated += grouped.calls_truncated

    def add_step(self, record: StepRecord) -> None:
        counts = record.status.counts
        self.steps += not record.is_empty
        self.empty_steps += record.is_empty
        self.add_dropped(counts)
        self.trained += counts.trained
        self.sampled_tokens += counts.sampled_tokens
        self.retokenised += counts.retokenised
        self.turns_joined += counts.turns_joined
        self.sealed += counts.sealed
        self.groups_without_variance += counts.groups_without_variance

    def add_dropped(self, counts: StepCounts) -> None:
        """A step that came to nothing is counted too."""
        self.groups += counts.groups
        self.members += counts.members
        self.samples += counts.samples
        self.dropped += Counter(counts.dropped)

    def to_dict(self) -> dict[str, Any]:
        counts = {"outcomes": self.outcomes, "outside": self.outside, "dropped": self.dropped}
        return asdict(self) | {name: dict(it) for name, it in counts.items()}


class Journal:
    """Reports each thing once: a line for people, an object for programs, a count in `report`.

    `history` has the object of each step, validation, alarm and rewind, as in `grpo.jsonl`.
    """

    def __init__(self, folder: Path | None, steps: int, stream: TextIO | None = None) -> None:
        self._path = folder / "grpo.jsonl" if folder is not None and folder.is_dir() else None
        self._steps = steps
        self._started = round(time.time(), 3)
        self._stream = stream or sys.stderr
        self._compile = ""
        self._noted: set[str] = set()
        self.report = Report()
        self.history: list[dict[str, Any]] = []

    def begin(self, place: Place) -> None:
        """Every line from here on has this compile's id. Its own line is written once."""
        self._compile = place.id
        if not place.step and not place.superseded:
            settings = {"settings": place.settings} if place.settings else {}
            work = {**place.work.to_dict(), "steps": self._steps, "step": 0, **settings}
            self._write("compile", work)

    def note(self, text: str) -> None:
        """A line for people alone."""
        line = fit(f"grpo: {sanitized(text)}", terminal_width(self._stream))
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def note_once(self, kind: str, text: str) -> None:
        """Each kind of trouble once, in full; from then on it is only counted."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)

    def step(self, record: StepRecord) -> None:
        self.report.add_step(record)
        line = record.to_dict()
        rollout_seconds, train_seconds = line["rollout_seconds"], line["train_seconds"]
        parts = [
            f"step {record.step}/{self._steps}",
            f"reward {line['reward']:.3f}{_error_text(line['standard_error'])}"
            + _by_predictor_text(line["rewards"]),
            f"parsed {line['parse_rate']:.0%}"
            + (f" (cut off {line['cut_off_rate']:.0%})" if line["cut_off_rate"] else ""),
            f"trained {line['counts']['trained']} of {line['counts']['samples']}"
            + _masked_text(line["metrics"]),
            *([f"resampled {plural(record.resampled, 'group')}"] if record.resampled else []),
            *_staleness_text(record.rollouts.staleness),
            *([f"left out {plural(record.stale, 'example')} as too old"] if record.stale else []),
            f"v{line['version']}" if line["version"] is not None else "no version",
            f"{rollout_seconds + train_seconds:.1f} s"
            f" (rollouts {rollout_seconds:.1f}, training {train_seconds:.1f})",
        ]
        self.note(" · ".join(parts))
        self._add("step", line, steps=self._steps, program_started=self._started)

    def backfill_step(self, record: StepRecord, figures: dict[str, Any]) -> None:
        """A step that was committed after its program had died; nothing if its line is there.

        `figures`: the run's own, in place of the record's.
        """
        line = record.to_dict() | figures
        if self._path is not None and not any(map(partial(_is_of, line, self._compile), self._lines())):
            step = f"step {record.step}/{self._steps}"
            self.note(f"{step} was committed after its program had died: noted now")
            self._write("step", {**line, "late": True})

    def validation(self, validated: Validated, figures: dict[str, Any], best: bool, seconds: float) -> None:
        words = [
            f"validation after {validated.step} of {self._steps} steps",
            f"score {validated.score:.3f}{_error_text(figures['standard_error'])}"
            + _by_predictor_text(figures["predictors"])
            + (" (best so far)" if best and validated.step else ""),
            *([f"crashed {crashed}"] if (crashed := figures["outcomes"].get("crashed")) else []),
            *_excluded_text(figures["outcomes"]),
            f"parsed {validated.parse_rate:.0%}",
            f"{seconds:.1f} s",
        ]
        self.note(" · ".join(words))
        entry = {**asdict(validated), **figures, "best": best}
        self._add("validation", entry, seconds=round(seconds, 3))

    def alarms(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            self.note(f"ALARM {alarm.name} after {alarm.step} steps: {alarm.text}")
            self.note(f"      what usually helps: {alarm.advice}")
            self.report.alarms.append(alarm.name)
            self._add("alarm", asdict(alarm))

    def rewind(self, was: int, now: int) -> None:
        """The machine was lost: from step `was` back to step `now`. `history` alone has it."""
        self.history.append({"kind": "rewind", "from": was, "to": now})
        self.note(f"the machine was lost: back from step {was} to step {now}, rolling out again")

    def _add(self, kind: str, fields: dict[str, Any], **more: Any) -> None:
        """`more`: fields that only the file has."""
        self.history.append({"kind": kind, **fields})
        self._write(kind, {**fields, **more})

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines of the file, without a line that a kill has cut short."""
        text = self._path.read_text() if self._path is not None and self._path.is_file() else ""
        for line in text.splitlines():
            with suppress(ValueError):
                yield json.loads(line)

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                now = round(time.time(), 3)
                line = {"kind": kind, "compile": self._compile, **_finite_json(fields), "time": now}
                file.write(json.dumps(line, allow_nan=False) + "\n")


def _is_of(line: dict[str, Any], compile_id: str, found: dict[str, Any]) -> bool:
    """Whether it is that version's line, and not one from a lost machine with the same number.

    Its step may be an earlier one: empty ones have come after it.
    """
    known = {"kind": "step", "compile": compile_id, "version": line["version"]}
    return found.items() >= known.items() and found.get("metrics") == line["metrics"]


def _finite_json(value: Any) -> Any:
    """A number that is not finite has no place in JSON."""
    if isinstance(value, dict):
        return {name: _finite_json(it) for name, it in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _masked_text(metrics: Mapping[str, float]) -> str:
    """The trained tokens that a bound of the loss has masked."""
    tokens = int(metrics.get("masked_tokens", 0))
    answers = plural(int(metrics.get("masked_sequences", 0)), "answer")
    return f" (masked {plural(tokens, 'token')} in {answers})" if tokens else ""


def _staleness_text(staleness: Mapping[int, int]) -> list[str]:
    """The number of answers that older versions sampled, if any."""
    older = sum(count for steps, count in staleness.items() if steps)
    oldest = max(staleness, default=0)
    return [f"{older} of {sum(staleness.values())} up to {plural(oldest, 'step')} old"] if older else []


def _excluded_text(outcomes: dict[str, int]) -> list[str]:
    """The runs of a validation that tell nothing about the policy."""
    excluded = ("unscored", "lost", "outside", "overdue")
    found = [f"{outcomes[name]} {name}" for name in excluded if outcomes.get(name)]
    return [f"left out: {', '.join(found)}"] if found else []


def _error_text(value: float) -> str:
    return f" ±{value:.3f}" if math.isfinite(value) else ""


def _by_predictor_text(values: dict[str, float]) -> str:
    if len(values) < 2:
        return ""
    return " (" + ", ".join(f"{name} {value:.3f}" for name, value in values.items()) + ")"


def plural(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def counts_text(counts: Mapping[str, int]) -> str:
    """`6 scored, 2 crashed`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
