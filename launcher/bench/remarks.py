"""What to know of a bench's figures: on which computer, how busy it was, and why they are no record.

Neighbours: `self_bench.py` shows it. Knows nothing of how things were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.bench.shape import STEPS, Shape
from launcher.bench.side_run import SideRun
from launcher.bench.this_computer import BUSY_SHARE


def no_record_because(shape: Shape, runs: Sequence[SideRun], seeds: int) -> list[str]:
    """Why these should not be quoted; `seeds`: how many a record needs."""
    most = max(run.computer[when] for run in runs for when in ("busy_before", "busy_meanwhile"))
    return [
        *([f"{shape.steps} steps, not {STEPS}"] if shape.steps < STEPS else []),
        *([f"{shape.seeds} of {seeds} seeds"] if shape.seeds < seeds else []),
        *([f"others used up to {most:.0%} of this computer"] if most > BUSY_SHARE else []),
    ]


def staleness(runs: Sequence[SideRun]) -> int:
    """How old, in steps, a sample of our side may have been."""
    return max(run.staleness for run in runs)


def remarks(
    shape: Shape, runs: Sequence[SideRun], computer: Mapping[str, Any], reasons: Sequence[str], folder: str
) -> list[str]:
    """The lines below a table."""
    loads = " ".join(f"{run.computer['load_before']:g}→{run.computer['load_after']:g}" for run in runs)
    seeds = "1 seed" if shape.seeds == 1 else f"{shape.seeds} seeds"
    return [
        f"{shape.steps} steps, {seeds}, our staleness {staleness(runs)}; load {loads}",
        f"{computer['cores']} cores ({computer['processor']}), {computer['memory_gib']} GiB",
        *([f"no record: {'; '.join(reasons)}"] if reasons else []),
        f"logs and runs: {folder}",
    ]
