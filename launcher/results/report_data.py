"""The data of a run's report, read from the files on this computer: rewards, validations, rates.

Neighbours: `report_page.py` draws it, `launch report` asks. Reads `metrics.jsonl`, `grpo.jsonl` and
`validations.jsonl`; for a run on this computer also the machine's newer ones. Torn, damaged or missing lines
are left out. Sends no request.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.results.journals import METRICS, read_lines, read_newest_lines

_JOURNAL, _VALIDATIONS = "grpo.jsonl", "validations.jsonl"
_REWARD = "reward/"
_STALENESS = re.compile(r"lag(\d{1,6})/trained_tokens")


@dataclass(frozen=True)
class ReportedStep:
    """One trained step; None for a value that was not measured. `predictors`: each one's mean reward."""

    step: int
    reward: float | None = None
    predictors: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    learning_rate: float | None = None
    parse_rate: float | None = None
    cut_off_rate: float | None = None
    # By how many steps old they were, the share of its tokens that a bound of the loss has stopped.
    stopped: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """One held-out score. `version`: the step of the run whose policy it is; `best`: the best so far."""

    compile: str
    step: int
    name: str
    version: int
    score: float
    standard_error: float | None = None
    best: bool = False


@dataclass(frozen=True)
class CompileScores:
    """One compile's scores before, after and at best; all the same if there was only one validation."""

    compile: str
    program: str
    before: Validation
    after: Validation
    best: Validation


@dataclass(frozen=True)
class RunData:
    """The data of one run in a report."""

    label: str
    id: str
    model: str
    state: str
    steps: list[ReportedStep]
    validations: list[Validation]
    trained: list[CompileScores]

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.validations

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return asdict(self)


def read(results: Path, machine: Path | None, *, label: str, run_id: str, model: str, state: str) -> RunData:
    """Read the run whose results are in `results`; `machine`: its machine's folder, while that is here."""
    journal = list(read_lines(results / _JOURNAL))
    found = _validations(journal, read_lines(longest_copy(results, machine, _VALIDATIONS)))
    return RunData(
        label,
        run_id,
        model,
        state,
        _steps(read_lines(longest_copy(results, machine, METRICS)), journal),
        found,
        list(_trained(found, journal)),
    )


def longest_copy(results: Path, machine: Path | None, name: str) -> Path:
    """A journal's longer copy: in a live run on this computer the machine's file is ahead of home's."""
    return max((folder / name for folder in (results, machine) if folder is not None), key=_size)


def newest_step_and_reward(results: Path, machine: Path) -> tuple[int | None, float | None]:
    """The newest step, and the mean reward of the newest one that has measured a reward."""
    newest: int | None = None
    for line in read_newest_lines(longest_copy(results, machine, METRICS)):
        step, measured = line.get("step"), line.get("metrics")
        if newest is None and isinstance(step, int):
            newest = step
        if isinstance(measured, dict) and (reward := _number(measured.get("reward"))) is not None:
            return newest, reward
    return newest, None


def step_times(results: Path, machine: Path) -> list[float]:
    """When each trained step ended, in order, as far as the newest part of the file reaches."""
    lines = read_newest_lines(longest_copy(results, machine, METRICS))
    times = [_number(line.get("time")) for line in lines if line.get("kind") == "train"]
    return sorted(time for time in times if time is not None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _steps(metrics: Iterable[Mapping[str, Any]], journal: Iterable[Mapping[str, Any]]) -> list[ReportedStep]:
    rates = _lines_by_version(journal)
    steps: dict[int, ReportedStep] = {}
    for line in metrics:
        number, measured = line.get("step"), line.get("metrics")
        if not isinstance(number, int) or not isinstance(measured, dict):
            continue
        rated = rates.get(number, {})
        step = ReportedStep(
            number,
            _number(measured.get("reward")),
            {
                name.removeprefix(_REWARD): value
                for name, it in measured.items()
                if name.startswith(_REWARD) and (value := _number(it)) is not None
            },
            _number(measured.get("loss")),
            _number(measured.get("learning_rate")),
            _number(rated.get("parse_rate")),
            _number(rated.get("cut_off_rate")),
            _clipped_by_staleness(measured),
        )
        if step != ReportedStep(number):  # a checkpoint that is served again has measured nothing
            steps[number] = step
    return [steps[number] for number in sorted(steps)]


def _clipped_by_staleness(measured: Mapping[str, Any]) -> dict[int, float]:
    """The share stopped by the clip and by `dual_clip`, by age; empty for a step whose answers are all of the
    newest version."""
    found: dict[int, float] = {}
    for lag in sorted(int(it[1]) for it in map(_STALENESS.fullmatch, measured) if it):
        tokens, clipped, masked = (
            _number(measured.get(f"lag{lag}/{name}"))
            for name in ("trained_tokens", "clip_fraction", "masked_tokens")
        )
        if tokens and clipped is not None and masked is not None:
            found[lag] = clipped + masked / tokens
    return found


def _lines_by_version(journal: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """An optimizer's line of each step, by version; a run that lost its machine takes some steps again."""
    found: dict[int, Mapping[str, Any]] = {}
    for line in journal:
        if line.get("kind") == "step" and isinstance(version := line.get("version"), int):
            found = {number: it for number, it in found.items() if number < version}
            found[version] = line
    return found


def _validations(
    journal: Iterable[Mapping[str, Any]], reported: Iterable[Mapping[str, Any]]
) -> list[Validation]:
    """The scores that an optimizer wrote down, replaced by those that programs reported to the run."""
    found: dict[tuple[str, int, str], Validation] = {}
    for line in journal:
        if line.get("kind") == "step" and isinstance(version := line.get("version"), int):
            found = {key: it for key, it in found.items() if it.version < version}  # its machine was lost
        elif line.get("kind") == "validation" and (one := _validation(line)) is not None:
            found[one.compile, one.step, one.name] = one
    best = {key for key, it in found.items() if it.best}
    for line in reported:
        if (one := _validation(line)) is not None:
            key = (one.compile, one.step, one.name)
            found[key] = Validation(**{**asdict(one), "best": key in best})
    return sorted(found.values(), key=lambda it: it.version)


def _validation(line: Mapping[str, Any]) -> Validation | None:
    score, step = _number(line.get("score")), line.get("step")
    if score is None or not isinstance(step, int):
        return None
    version = line.get("version")
    return Validation(
        str(line.get("compile", "")),
        step,
        str(line.get("name", "score")),
        version if isinstance(version, int) else step,
        score,
        _number(line.get("standard_error")),
        line.get("best") is True,
    )


def _trained(found: Iterable[Validation], journal: Iterable[Mapping[str, Any]]) -> Iterator[CompileScores]:
    programs = {
        str(it.get("compile")): str(it.get("program", "")) for it in journal if it.get("kind") == "compile"
    }
    of_compile: dict[str, list[Validation]] = {}
    for it in found:
        if it.name == "score":
            of_compile.setdefault(it.compile, []).append(it)
    for name, its in of_compile.items():
        in_order = sorted(its, key=lambda it: it.step)
        # As the optimizer judged, by the examples that two have in common; else by the means.
        judged = [it for it in in_order if it.best]
        best = judged[-1] if judged else max(in_order, key=lambda it: it.score)
        yield CompileScores(name, programs.get(name, ""), in_order[0], in_order[-1], best)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # NaN is not either
