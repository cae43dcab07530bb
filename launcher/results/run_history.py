"""What a run measured, read from the files on this computer: its steps, validations, alarms.

Neighbours: `dashboard/` shows it, `plot.py` draws it, `launch status` has its newest figures. Reads
`metrics.jsonl`, `grpo.jsonl`, `alarms.jsonl`, `empty_steps.jsonl` and `validations.jsonl`; for a run on this
computer also the machine's newer ones. Torn, damaged or missing lines are left out. Sends no request.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.results.journals import METRICS, read_lines, read_newest_lines

_JOURNAL, _VALIDATIONS, _ALARMS = "grpo.jsonl", "validations.jsonl", "alarms.jsonl"
_EMPTY = "empty_steps.jsonl"
_STALENESS = re.compile(r"lag(\d{1,6})/trained_tokens")
# An optimizer's own figures of a step, in its journal.
_OPTIMIZERS = (
    "parse_rate", "cut_off_rate", "length", "repetition", "reward_length", "reward_repetition",
    "rollout_seconds", "standard_error",
)  # fmt: skip
_MAX_TEXT_LENGTH = 400
_MAX_COLUMNS = 512

Column = list[float | None]


@dataclass(frozen=True)
class RecordedAlarm:
    """An alarm of a training: the run's step after which it was raised, what was seen, what to do."""

    name: str
    step: int
    text: str
    advice: str | None = None
    compile: str = ""


@dataclass(frozen=True)
class EmptyStep:
    """A step of which nothing could be trained, sent after step `after`, and why."""

    after: int
    why: str


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
class RunHistory:
    """One run's figures. `columns`: a value for each of `steps`, by its name in the files: the trainer's
    metrics as they are, counts as `counts.NAME`, an optimizer's own as in `grpo.jsonl`; and `seconds` (since
    the step before), `tokens_per_second` (of trained answers), `length` (tokens of a trained answer) where no
    optimizer has measured it, `stopped/LAG` (the share of tokens past a bound of the loss, by age in steps).
    `dropped`: the samples left out, by reason. None: not measured."""

    steps: list[int]
    times: Column
    kinds: list[str]
    columns: dict[str, Column]
    dropped: dict[str, Column]
    validations: list[Validation]
    trained: list[CompileScores]
    alarms: list[RecordedAlarm]
    empty: list[EmptyStep]

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.validations

    def column(self, name: str) -> Column:
        """None for each step, where there is no such figure."""
        return self.columns.get(name) or [None] * len(self.steps)


def read(results: Path, machine: Path | None) -> RunHistory:
    """Read the run whose results are in `results`; `machine`: its machine's folder, while that is here."""
    journal = list(read_lines(results / _JOURNAL))
    validations = _validations(journal, read_lines(longest_copy(results, machine, _VALIDATIONS)))
    lines = _step_lines(read_lines(longest_copy(results, machine, METRICS)))
    optimizers = _lines_by_version(journal)
    rows = [_figures(line, optimizers.get(step, {})) for step, line in lines.items()]
    times = [number(line.get("time")) for line in lines.values()]
    _add_durations(rows, times)
    return RunHistory(
        list(lines),
        times,
        [str(line.get("kind", "train"))[:_MAX_TEXT_LENGTH] for line in lines.values()],
        _columns(rows),
        _columns([_dropped(line) for line in lines.values()]),
        validations,
        list(_trained(validations, journal)),
        [*_alarms(journal, read_lines(results / _ALARMS))],
        [*_empty_steps(read_lines(longest_copy(results, machine, _EMPTY)))],
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
        if isinstance(measured, dict) and (reward := number(measured.get("reward"))) is not None:
            return newest, reward
    return newest, None


def step_times(results: Path, machine: Path) -> list[float]:
    """When each trained step ended, in order, as far as the newest part of the file reaches."""
    lines = read_newest_lines(longest_copy(results, machine, METRICS))
    times = [number(line.get("time")) for line in lines if line.get("kind") == "train"]
    return sorted(time for time in times if time is not None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _step_lines(lines: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The newest line of each step that has measured anything, in order."""
    found: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        step = line.get("step")
        measured = any(number(value) is not None for value in mapping(line.get("metrics")).values())
        if isinstance(step, int) and not isinstance(step, bool) and measured:
            found[step] = line
    return {step: found[step] for step in sorted(found)}


def _figures(line: Mapping[str, Any], optimizers: Mapping[str, Any]) -> dict[str, float | None]:
    measured, counts = mapping(line.get("metrics")), mapping(line.get("counts"))
    row = {str(name): number(value) for name, value in measured.items()}
    row |= {f"counts.{name}": number(value) for name, value in counts.items()}
    row |= {name: number(optimizers.get(name)) for name in _OPTIMIZERS}
    outcomes = mapping(optimizers.get("outcomes"))
    row |= {f"outcomes.{name}": number(value) for name, value in outcomes.items()}
    row |= {f"stopped/{lag}": share for lag, share in _clipped_by_staleness(measured).items()}
    trained, tokens = number(counts.get("trained")), number(counts.get("sampled_tokens"))
    if row["length"] is None and trained and tokens is not None:
        row["length"] = number(tokens / trained)
    return row


def _dropped(line: Mapping[str, Any]) -> dict[str, float | None]:
    dropped = mapping(mapping(line.get("counts")).get("dropped"))
    return {str(reason)[:_MAX_TEXT_LENGTH]: number(count) for reason, count in dropped.items()}


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Column]:
    """Without those that have no number in any row."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return {name: [row.get(name) for row in rows] for name in [*names][:_MAX_COLUMNS]}


def _add_durations(rows: Sequence[dict[str, float | None]], times: Column) -> None:
    """How long each took since the one before it, and how many tokens were sampled in a second of that."""
    for row, before, now in zip(rows[1:], times, times[1:], strict=False):
        seconds = None if before is None or now is None or now <= before else now - before
        tokens = row.get("counts.sampled_tokens")
        row["seconds"] = number(seconds)
        row["tokens_per_second"] = number(tokens / seconds) if seconds and tokens is not None else None


def _clipped_by_staleness(measured: Mapping[str, Any]) -> dict[int, float]:
    """The share stopped by the clip and by `dual_clip`, by age; empty for a step whose answers are all of the
    newest version."""
    found: dict[int, float] = {}
    for lag in sorted(int(it[1]) for it in map(_STALENESS.fullmatch, measured) if it):
        tokens, clipped, masked = (
            number(measured.get(f"lag{lag}/{name}"))
            for name in ("trained_tokens", "clip_fraction", "masked_tokens")
        )
        if tokens and clipped is not None and masked is not None:
            share = number(clipped + masked / tokens)
            found |= {} if share is None else {lag: share}
    return found


def _alarms(
    journal: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]
) -> Iterator[RecordedAlarm]:
    """An optimizer counts its own steps: an alarm is after the run's step that was its newest then."""
    newest: dict[str, int] = {}
    for line in journal:
        compile_id = str(line.get("compile", ""))
        if line.get("kind") == "step":
            version = line.get("version")
            newest[compile_id] = version if isinstance(version, int) else newest.get(compile_id, 0)
        elif line.get("kind") == "alarm":
            yield from _alarm(line, newest.get(compile_id))
    for line in others:
        yield from _alarm(line, None)


def _empty_steps(lines: Iterable[Mapping[str, Any]]) -> Iterator[EmptyStep]:
    for line in lines:
        if isinstance(after := line.get("after"), int):
            yield EmptyStep(after, str(line.get("error", ""))[:_MAX_TEXT_LENGTH])


def _alarm(line: Mapping[str, Any], step: int | None) -> Iterator[RecordedAlarm]:
    step = line.get("step") if step is None else step
    if not isinstance(step, int):
        return
    text, advice = (line.get(name) for name in ("text", "advice"))
    yield RecordedAlarm(
        str(line.get("name", "alarm"))[:_MAX_TEXT_LENGTH],
        step,
        str(text or "")[:_MAX_TEXT_LENGTH],
        str(advice)[:_MAX_TEXT_LENGTH] if advice else None,
        str(line.get("compile", "")),
    )


def _lines_by_version(journal: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """An optimizer's line of each step, by version; a run that lost its machine takes some steps again."""
    found: dict[int, Mapping[str, Any]] = {}
    newest = -1
    for line in journal:
        if line.get("kind") == "step" and isinstance(version := line.get("version"), int):
            if version <= newest:
                found = {number: it for number, it in found.items() if number < version}
            found[version] = line
            newest = version
    return found


def _validations(
    journal: Iterable[Mapping[str, Any]], reported: Iterable[Mapping[str, Any]]
) -> list[Validation]:
    """The scores that an optimizer wrote down, replaced by those that programs reported to the run."""
    found: dict[tuple[str, int, str], Validation] = {}
    newest = -1
    for line in journal:
        if line.get("kind") == "step" and isinstance(version := line.get("version"), int):
            if version <= newest:  # its machine was lost
                found = {key: it for key, it in found.items() if it.version < version}
            newest = version
        elif line.get("kind") == "validation" and (one := _validation(line)) is not None:
            found[one.compile, one.step, one.name] = one
    best = {key for key, it in found.items() if it.best}
    for line in reported:
        if (one := _validation(line)) is not None:
            key = (one.compile, one.step, one.name)
            found[key] = Validation(**{**asdict(one), "best": key in best})
    return sorted(found.values(), key=lambda it: it.version)


def _validation(line: Mapping[str, Any]) -> Validation | None:
    score, step = number(line.get("score")), line.get("step")
    if score is None or not isinstance(step, int):
        return None
    version = line.get("version")
    return Validation(
        str(line.get("compile", "")),
        step,
        str(line.get("name", "score")),
        version if isinstance(version, int) else step,
        score,
        number(line.get("standard_error")),
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


def number(value: Any) -> float | None:
    """A finite number; whole ones stay whole."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= sys.float_info.max else None  # NaN is not either


def mapping(value: Any) -> Mapping[str, Any]:
    """Empty for what is none."""
    return value if isinstance(value, dict) else {}
