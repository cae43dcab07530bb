"""A plot of one or several runs, by matplotlib: training reward and validation score, run beside run.

Neighbours: `launch report --to FILE` asks, `run_history.py` has the figures. The only file of the launcher
that imports matplotlib, which comes with the `dspy` extra.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from launcher.results.run_history import RunHistory

FORMATS = (".png", ".svg", ".pdf")
# The share of the smooth line that goes on from step to step.
_SMOOTHING = 0.8


def write(file: Path, runs: Mapping[str, RunHistory]) -> None:
    """Draw the runs, by their labels. Raises PreflightError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PreflightError(
            "a plot needs matplotlib",
            str(error),
            f"uv pip install --python {shlex.quote(sys.executable)} matplotlib",
        ) from None
    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    rewards, scores = figure.subplots(2, sharex=True)
    for at, (label, history) in enumerate(runs.items()):
        _draw_rewards(rewards, label, history, f"C{at}")
        _draw_scores(scores, label, history, f"C{at}", alone=len(runs) == 1)
    rewards.set(ylabel="training reward")
    scores.set(xlabel="step", ylabel="validation score (± one standard error)")
    for axes in (rewards, scores):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        why = error.strerror or str(error)
        raise PreflightError(f"cannot write {file}", why, f"df -h {file.parent}") from error


def smoothed(values: list[float]) -> list[float]:
    """The exponential moving average that trackers draw, with its bias corrected."""
    mean, found = 0.0, []
    for at, value in enumerate(values, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        found.append(mean / (1 - _SMOOTHING**at))
    return found


def _draw_rewards(axes: Any, label: str, history: RunHistory, colour: str) -> None:
    measured = zip(history.steps, history.column("reward"), strict=True)
    known = [(step, reward) for step, reward in measured if reward is not None]
    if not known:
        return
    steps, rewards = [step for step, _ in known], [reward for _, reward in known]
    axes.plot(steps, rewards, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, smoothed(rewards), color=colour, linewidth=2, label=label)


def _draw_scores(axes: Any, label: str, history: RunHistory, colour: str, alone: bool) -> None:
    names = dict.fromkeys((it.compile, it.name) for it in history.validations)
    for at, (compile_id, name) in enumerate(names):
        found = [it for it in history.validations if (it.compile, it.name) == (compile_id, name)]
        axes.errorbar(
            [it.version for it in found],
            [it.score for it in found],
            [it.standard_error or 0.0 for it in found],
            color=f"C{at}" if alone else colour,
            linestyle="-" if at == 0 else ":",
            marker="o",
            capsize=2,
            label=name if alone else f"{label} {name}",
        )
