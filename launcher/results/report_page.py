"""The report of one or several runs as one file: charts, a table, and all numbers.

Neighbours: `report_data.py` has read the numbers, `console/charts.py` draws. The page loads nothing from
elsewhere and has no script. Knows nothing of the runs' places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean

from launcher.console.charts import Bars, Chart, ChartLine, Point, page
from launcher.results.report_data import CompileScores, ReportedStep, RunData, Validation

_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:780px;margin:24px auto;"
    "padding:0 12px}table{border-collapse:collapse;margin:16px 0}td,th{text-align:left;"
    "padding:3px 14px 3px 0;border-bottom:1px solid #e4e4e4}svg{max-width:100%;height:auto}"
)
# Steps that one point of the smooth line is the mean of: a fifth of all, so many at most, an odd number.
_SMOOTHED_PART, _MOST_SMOOTHED = 5, 25
_MAX_PREDICTORS = 6


def svg(runs: Sequence[RunData]) -> str:
    """All charts in one picture."""
    return page(list(charts(runs)), _title(runs), [_details(run) for run in runs])


def html(runs: Sequence[RunData]) -> str:
    """The picture, the scores as a table, and every number as JSON."""
    # A `<` in a name must not end the script; JSON may write it so.
    numbers = json.dumps({"runs": [run.to_dict() for run in runs]}, allow_nan=False).replace("<", r"\u003c")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(_title(runs))}</title>',
            f"<style>{_STYLE}</style>",
            svg(runs),
            _table(runs),
            f'<script type="application/json" id="numbers">{numbers}</script>',
            "</html>\n",
        ]
    )


def charts(runs: Sequence[RunData]) -> Iterator[Chart | Bars]:
    """The charts: first a comparison of the runs, then each run's own."""
    if len(runs) > 1:
        yield from _comparison(runs)
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        yield from _of_run(run, name)


def smoothed(steps: Sequence[ReportedStep]) -> tuple[int, list[Point]]:
    """The reward's moving mean, each over as many steps before as behind; and over how many steps that is."""
    known = [(it.step, it.reward) for it in steps if it.reward is not None]
    around = min(_MOST_SMOOTHED, len(known) // _SMOOTHED_PART) // 2
    found = []
    for at, (step, _) in enumerate(known):
        # At the ends over fewer, as many on both sides: else the line would lean.
        reach = min(around, at, len(known) - 1 - at)
        found.append(Point(step, fmean(reward for _, reward in known[at - reach : at + reach + 1])))
    return 2 * around + 1, found


def _comparison(runs: Sequence[RunData]) -> Iterator[Chart | Bars]:
    groups = [
        (
            _name_of(run, one),
            {"before": _point(one.before), "after": _point(one.after), "best": _point(one.best)},
        )
        for run in runs
        for one in run.trained
    ]
    if groups:
        yield Bars("Validation score before, after and at best (± one standard error)", groups)
    lines = [
        ChartLine(_name_of(run, one), _scores(run, one.compile), "marks", at)
        for at, (run, one) in enumerate((run, one) for run in runs for one in run.trained)
    ]
    if lines:
        yield Chart("Validation score (± one standard error)", lines)


def _of_run(run: RunData, name: str) -> Iterator[Chart]:
    rewards = [Point(it.step, it.reward) for it in run.steps if it.reward is not None]
    if rewards:
        count, mean = smoothed(run.steps)
        legend = "all, mean of each step" if count == 1 else f"all, mean of {count} steps"
        lines = [ChartLine("each step", rewards, "faint"), ChartLine(legend, mean)]
        yield Chart(f"{name}Training reward", [*lines, *_predictors(run)])
    elif losses := [Point(it.step, it.loss) for it in run.steps if it.loss is not None]:
        yield Chart(f"{name}Training loss", [ChartLine("loss", losses)])
    if run.validations:
        yield Chart(f"{name}Validation score (± one standard error)", list(_validations(run)))
    parsed = [Point(it.step, it.parse_rate) for it in run.steps if it.parse_rate is not None]
    if parsed:
        cut_off = [Point(it.step, it.cut_off_rate) for it in run.steps if it.cut_off_rate is not None]
        lines = [ChartLine("parsed", parsed), *([ChartLine("cut off", cut_off, colour=1)] if cut_off else [])]
        yield Chart(f"{name}Share of runs whose answers parsed, or were cut off", lines, low=0.0, high=1.0)
    ages = sorted({age for it in run.steps for age in it.stopped})
    if ages:
        lines = [
            ChartLine(
                _staleness(age),
                [Point(it.step, it.stopped[age]) for it in run.steps if age in it.stopped],
                colour=at,
            )
            for at, age in enumerate(ages)
        ]
        yield Chart(f"{name}Share of tokens past a bound of the loss, by their age", lines, low=0.0)
    rates = [Point(it.step, it.learning_rate) for it in run.steps if it.learning_rate is not None]
    if rates:
        yield Chart(f"{name}Learning rate", [ChartLine("learning rate", rates)], low=0.0)


def _predictors(run: RunData) -> Iterator[ChartLine]:
    """Where there are several, each one's own line."""
    names = list(dict.fromkeys(name for it in run.steps for name in it.predictors))
    for at, name in enumerate(names[:_MAX_PREDICTORS] if len(names) > 1 else [], 1):
        points = [Point(it.step, it.predictors[name]) for it in run.steps if name in it.predictors]
        yield ChartLine(name, points, colour=at)


def _validations(run: RunData) -> Iterator[ChartLine]:
    kinds = dict.fromkeys((it.compile, it.name) for it in run.validations)
    for at, (compile_id, name) in enumerate(kinds):
        several = len({it for it, _ in kinds}) > 1
        words = [name, *([compile_id] if several and compile_id else [])]
        yield ChartLine(" ".join(words), _scores(run, compile_id, name), "marks", at)


def _scores(run: RunData, compile_id: str, name: str = "score") -> list[Point]:
    its = [it for it in run.validations if (it.compile, it.name) == (compile_id, name)]
    return [_point(it) for it in its]


def _point(one: Validation) -> Point:
    return Point(one.version, one.score, one.standard_error)


def _staleness(age: int) -> str:
    return "newest" if age == 0 else f"{age} step{'s' if age > 1 else ''} old"


def _name_of(run: RunData, one: CompileScores) -> str:
    return run.label if len(run.trained) == 1 else f"{run.label} {one.compile}"


def _title(runs: Sequence[RunData]) -> str:
    return " and ".join(run.label for run in runs) if len(runs) < 4 else f"{len(runs)} runs"


def _details(run: RunData) -> str:
    steps = f"{len(run.steps)} steps" if len(run.steps) != 1 else "1 step"
    named = f"{run.label} ({run.id})" if run.label != run.id else run.id
    return f"{named} · {run.model} · {steps} · {run.state}"


def _table(runs: Sequence[RunData]) -> str:
    head = "".join(f"<th>{it}</th>" for it in ("run", "program", "before", "after", "best"))
    rows = [
        (_name_of(run, one), one.program, *(_format_score(it) for it in (one.before, one.after, one.best)))
        for run in runs
        for one in run.trained
    ]
    body = "".join("<tr>" + "".join(f"<td>{escape(it)}</td>" for it in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if rows else ""


def _format_score(one: Validation) -> str:
    error = "" if one.standard_error is None else f" ±{one.standard_error:.3f}"
    return f"{one.score:.3f}{error} (step {one.version})"
