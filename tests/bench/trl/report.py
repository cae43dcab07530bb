"""What a comparison found, as one object and as a table for people; and what keeps it from being a record.

Neighbours: `tests/bench/against_trl.py` fills and prints it. Knows nothing of how things were measured.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.base.layout import columns
from launcher.bench import slipway_side
from launcher.bench.cpu_seconds import ALL
from launcher.bench.side_run import SideRun
from launcher.bench.table_footnotes import footnotes, max_staleness, reasons_not_to_quote
from launcher.bench.workload import Workload
from tests.bench.trl.side_by_side import REWARD_GOAL, WINDOW, Line, Pair, lines, rewards_over

# What a record needs.
SEEDS = 3

_STRETCHES = ("start", "evaluation", "training", "end")


@dataclass
class Compared:
    """All runs of a comparison."""

    shape: Workload
    computer: dict[str, Any]
    folder: str
    runs: list[SideRun] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def lines(self) -> list[Line]:
        """What is hoped for, and what was seen."""
        return lines(self.pairs, self.shape.first_step, self.shape.steps)

    @property
    def reasons_not_to_quote(self) -> list[str]:
        """Why this should not be quoted as what the trainers take."""
        return reasons_not_to_quote(self.shape, self.runs, SEEDS)

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "bench": "against trl",
            "lines": [line.to_dict(not self.reasons_not_to_quote) for line in self.lines],
            "reward_goal": REWARD_GOAL,
            "staleness": max_staleness(self.runs),
            "no_record_because": self.reasons_not_to_quote,
            "shape": self.shape.to_dict(),
            "computer": self.computer,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "runs": [run.to_dict() for run in self.runs],
            "folder": self.folder,
        }

    def text(self) -> str:
        """Two tables and what to know of them."""
        judged = [["", "ours", "trl", "ratio", "at most"]]
        judged += [
            [it.what, _seconds(it.ours), _seconds(it.theirs), self._ratio(it), f"{it.target:g}"]
            for it in self.lines
        ]
        below = footnotes(self.shape, self.runs, self.computer, self.reasons_not_to_quote, self.folder)
        tables = [judged, self._stretches()]
        if any(line.met is False for line in self.lines):
            tables.append(self._shares())
        return "\n".join([*(f"{columns(rows)}\n" for rows in tables), *below])

    def _stretches(self) -> list[list[str]]:
        """Where the seconds of whole runs are, medians over the seeds; apart, so that none hides another."""
        rows = [["seconds of a run", *_STRETCHES, "whole", "held out", "last reward"]]
        for side in dict.fromkeys(run.side for run in self.runs):
            runs = [run for run in self.runs if run.side == side]
            spans = [_median([getattr(run, f"{name}_seconds") for run in runs]) for name in _STRETCHES]
            scores = " → ".join(f"{_median([run.scores[at] for run in runs]):.2f}" for at in (0, -1))
            last = _median([rewards_over(run, WINDOW)[-1] for run in runs])
            whole = _median([run.seconds for run in runs])
            rows.append([side, *(f"{it:.1f}" for it in (*spans, whole)), scores, f"{last:.2f}"])
        return rows

    def _ratio(self, line: Line) -> str:
        """Judged where it is a record: on a busy computer either side may lose more than the other."""
        if line.ratio is None:
            return "-"
        verdict = "" if self.reasons_not_to_quote else " met" if line.met else " missed"
        return f"{line.ratio:.2f}{verdict}"

    def _shares(self) -> list[list[str]]:
        """Who computes while we train, of all cores' seconds: what to look at where a ratio is missed."""
        runs = [run for run in self.runs if run.side == slipway_side.NAME]
        seconds = Counter[str]()
        for run in runs:
            seconds.update(run.cpu_seconds["training"])
        whole = sum(run.training_seconds for run in runs) * (self.computer["cores"] or 1)
        steps = sum(len(run.steps) for run in runs)
        named = {name: value for name, value in seconds.most_common() if name != ALL}
        others = max(0.0, seconds[ALL] - sum(named.values()))
        named |= {"others, and unseen": others, "nobody": max(0.0, whole - others - sum(named.values()))}
        rows = [["our training", "seconds of a core, a step", "of all cores'"]]
        return rows + [[name, f"{it / steps:.2f}", f"{it / whole:.1%}"] for name, it in named.items()]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
