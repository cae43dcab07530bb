"""One side's run, read from its files: the end and reward of each step, and the time of everything else.

Neighbours: `slipway_side.py` reads ours from its files, `self_bench.py` shows it;
`tests/bench/trl/trl_side.py` reads another trainer's. Knows nothing of processes.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.base.errors import JobFailed
from launcher.bench.child import ProcessLifetime
from launcher.bench.cpu_seconds import ALL, CpuSeconds

# A process that computed less in a stretch is not listed.
_MIN_SECONDS = 0.05


@dataclass(frozen=True)
class Step:
    """`ended`: seconds from the start of training until the step's policy is used; the two durations are
    its parts."""

    ended: float
    reward: float
    rollout_seconds: float
    training_seconds: float


@dataclass(frozen=True)
class SideRun:
    """One run of one side. The time outside its four stretches lies between them."""

    side: str
    seed: int
    seconds: float
    start_seconds: float
    evaluation_seconds: float
    training_seconds: float
    end_seconds: float
    scores: tuple[float, ...]
    steps: tuple[Step, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    staleness: int = 0
    # The computer's state: load before and after, other busy processes, and their share meanwhile.
    computer: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""
    # Processor seconds in each stretch, by process.
    cpu_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Further measurements of the run, by name.
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> list[float]:
        """From the end of the step before to its own."""
        ends = [0.0, *(step.ended for step in self.steps)]
        return [later - sooner for sooner, later in pairwise(ends)]

    @property
    def other_processes_seconds(self) -> float:
        """Processor seconds of all other processes while this side trained."""
        computed = self.cpu_seconds.get("training", {})
        own = sum(seconds for name, seconds in computed.items() if name != ALL)
        return max(0.0, computed.get(ALL, 0.0) - own)

    def median_seconds(self, first_step: int) -> float:
        """The median seconds of the steps from that one on."""
        return statistics.median(self.step_seconds[first_step - 1 :])

    def to_dict(self) -> dict[str, Any]:
        """The run as it stands in the result."""
        return {
            "side": self.side,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "start_seconds": round(self.start_seconds, 2),
            "evaluation_seconds": round(self.evaluation_seconds, 2),
            "training_seconds": round(self.training_seconds, 2),
            "end_seconds": round(self.end_seconds, 2),
            "scores": [round(score, 3) for score in self.scores],
            "staleness": self.staleness,
            "step_seconds": [round(it, 3) for it in self.step_seconds],
            "rollout_seconds": [round(step.rollout_seconds, 3) for step in self.steps],
            "train_seconds": [round(step.training_seconds, 3) for step in self.steps],
            "rewards": [round(step.reward, 3) for step in self.steps],
            "settings": dict(self.settings),
            "computer": dict(self.computer),
            "cpu_seconds": self.cpu_seconds,
            "measured": dict(self.measured),
            "folder": self.folder,
        }


class Log:
    """The log of a side's program (`programs/side_log.py`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = lines_of(path)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All lines of a kind, in order."""
        return [line for line in self._lines if line["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        """The only line of a kind. Raises JobFailed if the program did not come that far."""
        found = self.of(kind)
        if len(found) != 1:
            raise JobFailed(
                "a program of the bench did not log everything it should",
                f"{len(found)} times {kind} in its log, instead of once",
                f"less {self._path}",
            )
        return found[0]


def build_side_run(
    side: str,
    seed: int,
    lifetime: ProcessLifetime,
    log: Log,
    steps: Sequence[Step],
    folder: Path,
    staleness: int = 0,
) -> SideRun:
    """Build one run from its process's lifetime and its program's log: it starts before the first
    evaluation, and ends after the log's last line."""
    evaluations, training, last = log.of("evaluation"), log.one("training"), log.one("settings")
    spans = {
        "start": [(lifetime.began, evaluations[0]["began"])],
        "evaluation": [(it["began"], it["time"]) for it in evaluations],
        "training": [(training["began"], training["time"])],
        "end": [(last["time"], lifetime.ended)],
    }
    return SideRun(
        side=side,
        seed=seed,
        seconds=lifetime.ended - lifetime.began,
        start_seconds=evaluations[0]["began"] - lifetime.began,
        evaluation_seconds=sum(it["time"] - it["began"] for it in evaluations),
        training_seconds=training["time"] - training["began"],
        end_seconds=lifetime.ended - last["time"],
        scores=tuple(it["score"] for it in evaluations),
        steps=tuple(steps),
        settings=last["settings"],
        staleness=staleness,
        folder=str(folder),
        cpu_seconds={name: _computed(lifetime.cpu, stretches) for name, stretches in spans.items()},
    )


def _computed(cpu: CpuSeconds, stretches: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The seconds that each process computed in some stretches of time, most first."""
    sums = Counter[str]()
    for began, ended in stretches:
        sums.update(cpu.between(began, ended))
    return {name: round(seconds, 2) for name, seconds in sums.most_common() if seconds >= _MIN_SECONDS}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]
