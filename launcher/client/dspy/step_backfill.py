"""The line of a step that was committed after its program had died: its next life writes it, once.

It has the run's own data of the step. The outcomes and durations of its rollouts are lost.
Neighbours: `training.py` asks as it begins, `report.py` writes. Knows nothing of rollouts or of the wire.
"""

from __future__ import annotations

import math

from launcher.client.dspy.report import Journal
from launcher.client.dspy.training_place import Place
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.session import Session
from launcher.client.step_record import StepRecord, StepRollouts

_REWARD = "reward/"


def backfill_last_step(place: Place, epoch: int, session: Session, journal: Journal) -> None:
    """Write the line of the last step that is done, unless it is there. `epoch`: of that step."""
    if not place.step:
        return
    # The newest committed step carried the place; it is served, or will be the next.
    entries = session.metrics(after=max(0, session.version - 1))
    if not entries or entries[-1].get("kind") != "train":  # or a checkpoint that is served again
        return
    entry = entries[-1]
    metrics = {name: it for name, it in entry["metrics"].items() if it is not None and math.isfinite(it)}
    counts = StepCounts.model_validate(entry["counts"])
    status = StepStatus(id=0, key="", state="committed", version=entry["version"], counts=counts)
    figures = {
        "reward": metrics.get("reward", math.nan),
        "spread": metrics.get("reward_deviation", math.nan),
        "rewards": {
            name.removeprefix(_REWARD): it for name, it in metrics.items() if name.startswith(_REWARD)
        },
        "metrics": metrics,
    }
    journal.backfill_step(StepRecord(place.step, epoch, StepRollouts(), status), figures)
