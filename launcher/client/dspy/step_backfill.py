"""The line of a step that was committed after its program had died: its next life writes it, once.

It has the run's own data of the step. The outcomes and durations of its rollouts are lost.
Neighbours: `training.py` asks as it begins, `report.py` writes. Knows nothing of rollouts or of the wire.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.client.dspy.report import Journal, StepLine
from launcher.client.dspy.training_place import Place
from launcher.client.schema import StepCounts
from launcher.client.session import Session

_REWARD = "reward/"


def backfill_last_step(place: Place, epoch: int, session: Session, journal: Journal) -> None:
    """Write the line of the last step that is done, unless it is there. `epoch`: of that step."""
    if not place.step:
        return
    # The newest committed step carried the place; it is served, or will be the next.
    entries = session.metrics(after=max(0, session.version - 1))
    if entries and entries[-1].get("kind") == "train":  # and no checkpoint that is served again
        journal.backfill_step(_step_line(place.step, epoch, entries[-1]))


def _step_line(step: int, epoch: int, entry: dict[str, Any]) -> StepLine:
    metrics = {name: it for name, it in entry["metrics"].items() if it is not None and math.isfinite(it)}
    return StepLine(
        step=step,
        epoch=epoch,
        version=entry["version"],
        reward=metrics.get("reward", math.nan),
        spread=metrics.get("reward_deviation", math.nan),
        rewards={name.removeprefix(_REWARD): it for name, it in metrics.items() if name.startswith(_REWARD)},
        parse_rate=math.nan,
        cut_off_rate=math.nan,
        outcomes={},
        counts=StepCounts.model_validate(entry["counts"]).model_dump(),
        metrics=metrics,
        rollout_seconds=math.nan,
        train_seconds=math.nan,
    )
