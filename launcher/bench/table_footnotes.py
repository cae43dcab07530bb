"""The lines below a bench's table: the computer, its load, and the reasons why the figures are no record.

Neighbours: `self_bench.py` shows them. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.bench.side_run import SideRun
from launcher.bench.this_computer import BUSY_SHARE
from launcher.bench.workload import STEPS, Workload


def reasons_not_to_quote(shape: Workload, runs: Sequence[SideRun], seeds: int) -> list[str]:
    """The reasons not to quote these figures; `seeds`: how many a record needs."""
    most = max(run.computer[when] for run in runs for when in ("busy_before", "busy_meanwhile"))
    return [
        *([f"{shape.steps} steps, not {STEPS}"] if shape.steps < STEPS else []),
        *([f"{shape.seeds} of {seeds} seeds"] if shape.seeds < seeds else []),
        *([f"others used up to {most:.0%} of this computer"] if most > BUSY_SHARE else []),
    ]


def max_staleness(runs: Sequence[SideRun]) -> int:
    """The largest staleness, in steps, of our side's samples."""
    return max(run.staleness for run in runs)


def footnotes(
    shape: Workload, runs: Sequence[SideRun], computer: Mapping[str, Any], reasons: Sequence[str], folder: str
) -> list[str]:
    """The lines below a table."""
    loads = " ".join(f"{run.computer['load_before']:g}→{run.computer['load_after']:g}" for run in runs)
    seeds = "1 seed" if shape.seeds == 1 else f"{shape.seeds} seeds"
    return [
        f"{shape.steps} steps, {seeds}, our staleness {max_staleness(runs)}; load {loads}",
        f"{computer['cores']} cores ({computer['processor']}), {computer['memory_gib']} GiB",
        *([f"no record: {'; '.join(reasons)}"] if reasons else []),
        f"logs and runs: {folder}",
    ]
