"""`launch bench` without another trainer: the targets that a computer without a GPU can measure.

One run of the quickstart's task shows nearly all of them: its start, steps, publications and end, and the
cost of a request on its way. Neighbours: `cli/bench_verb.py` calls, `slipway_side.py` runs.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launcher.base import embedded_models
from launcher.base.home import Home
from launcher.base.layout import columns
from launcher.base.module_command import module_command
from launcher.bench import slipway_side, this_computer
from launcher.bench.prerequisites import build_environment, refuse_unable_computer
from launcher.bench.runs import max_seconds, new_folder, run_supervised
from launcher.bench.side_run import SideRun
from launcher.bench.table_footnotes import footnotes, max_staleness, reasons_not_to_quote
from launcher.bench.workload import STEPS, Workload
from launcher.console.output import Output

_HELP_RUNS = 5
_LETTERS = 26
# How often the cost of a request is measured, beside a whole run and beside a short one.
_REQUESTS = {"rounds": 3, "concurrent": 64, "each_round": 256, "single": 24}
_FEW_REQUESTS = {"rounds": 1, "concurrent": 64, "each_round": 64, "single": 8}


@dataclass(frozen=True)
class Measurement:
    """One figure and its target: at least or at most `target`, None if there is none."""

    what: str
    seen: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met."""
        if self.target is None:
            return None
        return self.seen >= self.target if self.at_least else self.seen <= self.target

    def to_dict(self, judged: bool) -> dict[str, Any]:
        """The measurement as it stands in the result."""
        return {
            "what": self.what,
            "seen": round(self.seen, 4),
            "unit": self.unit,
            "target": self.target,
            "at_least": self.at_least,
            "met": self.met if judged else None,
        }

    def cells(self, judged: bool) -> list[str]:
        """The cells of its row in the table."""
        seen = f"{self.seen:.3g} {self.unit}"
        if self.target is None:
            return [self.what, seen, "", ""]
        hoped = f"{'≥' if self.at_least else '≤'} {self.target:g} {self.unit}"
        return [self.what, seen, hoped, ("met" if self.met else "missed") if judged else ""]


@dataclass
class SelfBench:
    """The figures of this bench."""

    shape: Workload
    computer: dict[str, Any]
    folder: str
    help_seconds: float
    runs: list[SideRun] = field(default_factory=list)

    @property
    def lines(self) -> list[Measurement]:
        """Medians over the runs; for a promise to each run, the worst of them."""
        runs, whole = self.runs, self.shape.steps >= STEPS
        publications = [it for run in runs for it in run.measured["publication_seconds"]]
        requests = [run.measured["requests"] for run in runs]
        rise = min(run.scores[-1] - run.scores[0] for run in runs) / _LETTERS
        added = [it["p50_ms"]["gateway"] - it["p50_ms"]["direct"] for it in requests]
        first, last = self.shape.first_step, self.shape.steps
        step = statistics.median(run.median_seconds(first) for run in runs)
        rate = statistics.median(it["gateway_to_direct"] for it in requests)
        return [
            # Measurements beside the task are not part of its time.
            Measurement(
                "from Enter to verified down", max(map(_of_task, runs)), "s", 300.0 if whole else None
            ),
            Measurement("its start", statistics.median(run.start_seconds for run in runs), "s"),
            Measurement(f"a step, of {first} to {last}" if first < last else f"step {last}", step, "s"),
            Measurement("its end", statistics.median(run.end_seconds for run in runs), "s"),
            Measurement("held-out rise, of the range", rise, "", 0.25 if whole else None, at_least=True),
            Measurement(
                "committed → served and proven, p50", 1000 * statistics.median(publications), "ms", 250.0
            ),
            Measurement("gateway's rate by direct, 64 in flight", rate, "×", 0.95, at_least=True),
            Measurement("gateway's own latency, p50", statistics.median(added), "ms", 3.0),
            Measurement("launch --help", self.help_seconds, "s", 0.4),
        ]

    @property
    def reasons_not_to_quote(self) -> list[str]:
        """The reasons not to quote these figures."""
        return reasons_not_to_quote(self.shape, self.runs, 1)

    def to_dict(self) -> dict[str, Any]:
        """The bench as `--json` prints it."""
        return {
            "bench": "alone",
            "lines": [line.to_dict(not self.reasons_not_to_quote) for line in self.lines],
            "staleness": max_staleness(self.runs),
            "no_record_because": self.reasons_not_to_quote,
            "shape": self.shape.to_dict(),
            "computer": self.computer,
            "runs": [run.to_dict() for run in self.runs],
            "folder": self.folder,
        }

    def text(self) -> str:
        """The table and its footnotes."""
        rows = [
            ["", "seen", "hoped for", ""],
            *(line.cells(not self.reasons_not_to_quote) for line in self.lines),
        ]
        below = footnotes(self.shape, self.runs, self.computer, self.reasons_not_to_quote, self.folder)
        return "\n".join([columns(rows), "", *below])


def run_self_bench(shape: Workload, output: Output, home: Home) -> SelfBench:
    """All runs of our side. Raises PreflightError and JobFailed."""
    refuse_unable_computer(home)
    build_environment(home, output)
    folder, model = new_folder(home), embedded_models.folder_of("tiny")
    found = SelfBench(shape, this_computer.described(), str(folder), _help_seconds())
    for number in range(shape.seeds):
        requests = _REQUESTS if shape.steps >= STEPS else _FEW_REQUESTS
        task = {**shape.task(number, model), "requests": requests}
        run = partial(slipway_side.run, task, home, max_seconds(shape))
        found.runs.append(run_supervised(slipway_side.NAME, number, shape, run, folder, output))
    return found


def _of_task(run: SideRun) -> float:
    return run.start_seconds + run.evaluation_seconds + run.training_seconds + run.end_seconds


def _help_seconds() -> float:
    """The median duration of a few `launch --help`."""
    took = []
    for _ in range(_HELP_RUNS):
        began = time.perf_counter()
        subprocess.run([*module_command("launcher.cli.main"), "--help"], capture_output=True, check=True)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
