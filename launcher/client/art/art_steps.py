"""A step of ART's trajectories: their groups become members, its keywords settings, once, until it is served.

Neighbours: `trajectories/members.py` says what of a trajectory is trained, `nameless_choices.py` which sample
a choice without a name is, `train_kwargs.py` what a keyword is on this run; `backend.py` calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.client import train_kwargs
from launcher.client.art.art_notes import say_once
from launcher.client.art.nameless_choices import look_up
from launcher.client.failures import Refused, TrainingFailed
from launcher.client.schema import Group, StepStatus
from launcher.client.session import Session
from launcher.client.trajectories.members import group_of

# A program that has nothing to train so often in a row has something wrong with it.
MOST_UNTRAINED = 8
# As ART calls them; any other number of ours keeps its name.
_NAMES = {"loss": "loss/train", "grad_norm": "loss/grad_norm", "learning_rate": "loss/learning_rate"}


@dataclass
class TrainResult:
    """What a program reads of a step, by ART's own names. `trained`: whether there was one."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_path: str | None = None
    trained: bool = True


class ArtTraining:
    """The steps of one backend."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._untrained = 0

    def step(self, trajectory_groups: Sequence[Any], keywords: Mapping[str, Any]) -> TrainResult:
        """One step, until it is served.

        Raises TrainingFailed for a keyword that the run cannot follow, and where nothing could be trained for
        too long; what a step itself raises.
        """
        meant = train_kwargs.resolve(self._session.connection, keywords, trainer="art")
        for note in meant.notes:
            say_once(note)
        groups, dropped = members_of(trajectory_groups, look_up(self._session, trajectory_groups))
        began = time.monotonic()
        if not groups:
            return self._in_vain(dropped)
        try:
            status = self._session.step(groups, settings=meant.settings)
        except Refused as refused:
            if refused.code != "nothing_to_train":
                raise
            return self._in_vain(dropped + Counter(_counts(refused)))
        self._untrained = 0
        metrics = measured(status, dropped)
        metrics["time/step_trainer_s"] = time.monotonic() - began
        return TrainResult(status.version or status.id, metrics)

    def _in_vain(self, dropped: Counter[str]) -> TrainResult:
        self._untrained += 1
        reasons = ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
        why = reasons or "there was no trajectory"
        if self._untrained >= MOST_UNTRAINED:
            raise TrainingFailed(
                f"Nothing could be trained {self._untrained} times in a row",
                why=why,
                hint="a trajectory is trained by the choices that the policy's own client returned",
            )
        say_once(f"nothing of these trajectories can be trained, so there is no step: {why}")
        left_out = float(sum(dropped.values()))
        version = self._session.status().version
        return TrainResult(version, {"samples_trained": 0.0, "samples_left_out": left_out}, trained=False)


def members_of(
    trajectory_groups: Sequence[Any], found: Mapping[int, str]
) -> tuple[list[Group], Counter[str]]:
    """The groups to train, and what is left out, by reason. `found`: see `group_of`."""
    groups: list[Group] = []
    left_out: Counter[str] = Counter()
    for number, one in enumerate(trajectory_groups):
        group, dropped = group_of(one, str(number), found)
        left_out += dropped
        groups += [group] if group is not None else []
    return groups, left_out


def measured(status: StepStatus, dropped: Counter[str]) -> dict[str, float]:
    """A step's numbers under ART's names, and what became of the samples it named."""
    found = {_NAMES.get(name, name): float(value) for name, value in status.metrics.items()}
    found["samples_trained"] = float(status.counts.trained)
    found["samples_left_out"] = float(sum(status.counts.dropped.values()) + sum(dropped.values()))
    return found


def _counts(refused: Refused) -> dict[str, int]:
    counts = refused.error.get("counts")
    dropped = counts.get("dropped") if isinstance(counts, dict) else None
    return dropped if isinstance(dropped, dict) else {}
