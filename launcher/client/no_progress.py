"""The no-progress guard: when a loop of steps gives up, the same for every way to train.

| a step ends so | at first | so often in a row |
|---|---|---|
| nothing of it can be trained | it is no step; the loop goes on | TrainingFailed (`max_empty_steps`) |
| its machine was lost | Rewound: roll out again | TrainingFailed (`MAX_REWINDS`) |
| trained | both counts begin again | |

Any other error is the loop's own. Neighbours: `session.py` has the setting; every loop has one guard of its
own: `trajectories/train_groups.py`, `art/art_training.py`, `autorl/from_task.py`, and under `dspy/`
`training.py`, `reinforce_job.py` and `training_job.py`. Knows nothing of rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.client.failures import Refused, Rewound, TrainingFailed
from launcher.client.schema import StepCounts

# Unless a program gives another number (`connect(max_empty_steps=…)`).
MAX_EMPTY_STEPS = 3
MAX_REWINDS = 3

_NOTHING_TO_TRAIN = "nothing_to_train"


@dataclass(frozen=True)
class NothingToTrain:
    """The runtime's answer to a step of which nothing can be trained: the reason, and counts by reason."""

    why: str
    counts: StepCounts

    @classmethod
    def of(cls, refused: Refused) -> NothingToTrain:
        """Raises the error again when it says anything else."""
        if refused.code != _NOTHING_TO_TRAIN:
            raise refused
        counts = StepCounts.model_validate(refused.error.get("counts") or {})
        return cls(refused.why or refused.message, counts)


@dataclass
class NoProgressGuard:
    """Counts the steps in a row that trained nothing, and the losses of the machine in a row."""

    max_empty_steps: int = MAX_EMPTY_STEPS
    _empty: int = field(default=0, init=False)
    _rewinds: int = field(default=0, init=False)

    def trained(self) -> None:
        """A step was trained."""
        self._empty = self._rewinds = 0

    def empty(self, why: str, hint: str) -> None:
        """Nothing of a step could be trained. Raises TrainingFailed when it was one too many."""
        self._empty += 1
        if self._empty >= self.max_empty_steps:
            raise TrainingFailed(f"Nothing could be trained in {self._empty} steps in a row", why, hint)

    def rewound(self, rewound: Rewound) -> None:
        """The machine was lost. Raises TrainingFailed when it was one time too many."""
        self._rewinds += 1
        if self._rewinds >= MAX_REWINDS:
            raise TrainingFailed(
                f"The run was rewound {self._rewinds} times without a step in between",
                rewound.why,
                "`launch status` shows the run; its log says why the machine keeps being lost",
            ) from rewound


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Counts by reason in words: `3 × no reward, 1 × too old`."""
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
