"""One step of ART's trajectories: their groups become members, its keywords settings, and the step is awaited
until it is served.

Neighbours: `trajectories/members.py` picks the trained part of a trajectory, `sample_lookup.py` finds the
sample of a choice without a name, `train_kwargs.py` resolves keywords on this run; `backend.py` calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launcher.client import train_kwargs
from launcher.client.art.sample_lookup import look_up_samples
from launcher.client.art.stderr_log import log_once
from launcher.client.no_progress import NoProgressGuard, NothingToTrain, dropped_text
from launcher.client.request_bodies import Group
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.session import Session
from launcher.client.train_once import train_once
from launcher.client.trajectories.members import group_of

# As ART calls them; any other number of ours keeps its name.
_ART_METRIC_NAMES = {
    "loss": "loss/train",
    "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate",
}


@dataclass
class TrainResult:
    """A step's result by ART's own names. `trained`: whether a step was taken."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_path: str | None = None
    trained: bool = True


class ArtTraining:
    """The steps of one backend."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.guard = NoProgressGuard(session.max_empty_steps)

    def step(self, trajectory_groups: Sequence[Any], keywords: Mapping[str, Any]) -> TrainResult:
        """One step, until it is served.

        Raises TrainingFailed for a keyword that the run cannot follow, and by the guard
        (`no_progress.py`); also the errors of the step itself.
        """
        resolved = train_kwargs.resolve(self._session.connection, keywords, trainer="art")
        for note in resolved.notes:
            log_once(note)
        groups, dropped = groups_of(trajectory_groups, look_up_samples(self._session, trajectory_groups))
        began = time.monotonic()
        if not groups:
            return self._empty_step(dropped, NothingToTrain("there was no trajectory", StepCounts()))
        send = partial(self._session.step, groups, settings=resolved.settings)
        status = train_once(send, self.guard, may_be_late=True)
        if isinstance(status, NothingToTrain):
            return self._empty_step(dropped, status)
        metrics = step_metrics(status, dropped)
        metrics["time/step_trainer_s"] = time.monotonic() - began
        return TrainResult(status.version or status.id, metrics)

    def _empty_step(self, left_out: Counter[str], nothing: NothingToTrain) -> TrainResult:
        dropped = left_out + Counter(nothing.counts.dropped)
        why = dropped_text(dropped) or nothing.why
        hint = "a trajectory is trained by the choices that the policy's own client returned"
        self.guard.empty(why, hint, counts=nothing.counts)
        log_once(f"nothing of these trajectories can be trained, so there is no step: {why}")
        counted = {"samples_trained": 0.0, "samples_left_out": float(dropped.total())}
        return TrainResult(self._session.status().version, nothing.metrics | counted, trained=False)


def groups_of(trajectory_groups: Sequence[Any], found: Mapping[int, str]) -> tuple[list[Group], Counter[str]]:
    """The groups to train, and the number of parts that are left out, by reason. `found`: see `group_of`."""
    groups: list[Group] = []
    left_out: Counter[str] = Counter()
    for number, one in enumerate(trajectory_groups):
        group, dropped = group_of(one, str(number), found)
        left_out += dropped
        groups += [group] if group is not None else []
    return groups, left_out


def step_metrics(status: StepStatus, dropped: Counter[str]) -> dict[str, float]:
    """A step's numbers under ART's names, and the counts of the samples it named."""
    found = {_ART_METRIC_NAMES.get(name, name): float(value) for name, value in status.metrics.items()}
    found["samples_trained"] = float(status.counts.trained)
    found["samples_left_out"] = float(sum(status.counts.dropped.values()) + sum(dropped.values()))
    return found
