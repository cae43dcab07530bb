"""The DSPy compiles of a run, one entry each, read from `results/grpo.jsonl`.

Neighbours: `client/dspy/report.py` writes the file, each line with its compile's id; `run_verbs.py` shows
these in `launch status`. Reads only files at home; a line that is cut short or damaged is passed over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base.units import format_duration
from launcher.results.journals import read_lines

JOURNAL = "grpo.jsonl"


@dataclass
class Compile:
    """One optimizer's work. Scores are the metric's means; None until there is one.

    `best`: of the validations, by the examples that both have scored; `best_checkpoint` holds that policy,
    None if it is the model before the training. `seconds`: the sum of its steps' own times.
    """

    id: str
    program: str = ""
    metric: str = ""
    steps: int | None = None
    done: int = 0
    seconds: float = 0.0
    reward: float | None = None
    score: float | None = None
    best: float | None = None
    best_checkpoint: str | None = None
    alarms: int = 0

    def add_line(self, line: dict[str, Any]) -> None:
        """One line of its stream. Raises KeyError, TypeError or ValueError for one that is not as written."""
        match line["kind"]:
            case "compile":
                self.program, self.metric = str(line["program"]), str(line["metric"])
                self.steps = int(line["steps"])
            case "step":
                self.done = int(line["step"])  # a rewound one takes some of them again
                self.reward = line["reward"]
                if not line.get("late"):  # the duration of such a step is unknown
                    self.seconds += float(line["rollout_seconds"]) + float(line["train_seconds"])
            case "validation":
                self.score = line["score"]
                if line["best"]:
                    self.best, self.best_checkpoint = line["score"], line["checkpoint"]
            case "alarm":
                self.alarms += 1
            case _:
                pass

    def to_dict(self) -> dict[str, Any]:
        """The keys of `--json`."""
        return asdict(self)

    def describe(self) -> str:
        """For people: "optimize.py · accuracy · 12 of 40 steps in 1m 3s · validation 0.62, best 0.66"."""
        of = "" if self.steps is None else f" of {self.steps}"
        words = [word for word in (self.program, self.metric) if word]
        words.append(f"{self.done}{of} steps in {format_duration(self.seconds)}")
        if self.reward is not None:
            words.append(f"reward {self.reward:.3g}")
        if self.score is not None:
            best = "" if self.best is None else f", best {self.best:.3g}"
            where = f" ({self.best_checkpoint})" if self.best_checkpoint else ""
            words.append(f"validation {self.score:.3g}{best}{where}")
        if self.alarms:
            words.append(f"{self.alarms} alarms" if self.alarms > 1 else "1 alarm")
        return " · ".join(words)


def of_run(results: Path) -> list[Compile]:
    """Every compile that has written a line, in the order of their first."""
    found: dict[str, Compile] = {}
    for line in read_lines(results / JOURNAL):
        try:
            name = str(line["compile"])
            found.setdefault(name, Compile(name)).add_line(line)
        except (KeyError, TypeError, ValueError):
            continue
    return list(found.values())
