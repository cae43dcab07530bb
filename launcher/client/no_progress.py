"""The no-progress guard: when a loop of steps gives up, the same for every way to train.

| a step, when it is sent, | at first | so often in a row |
|---|---|---|
| has nothing that can be trained | it is no step; the loop goes on | TrainingFailed (`max_empty_steps`) |
| can be trained, but all rewards are equal | it is no step; both counts begin anew | |
| names rollouts of a lost machine | Rewound: roll out again | TrainingFailed (`MAX_REWINDS`) |
| is trained | both counts begin anew | |

Equal rewards are no fault of a program: with few groups they come often, and other examples may tell answers
apart. Any other error is the loop's own. Neighbours: `train_once.py` tells it how a step ended;
`session.py` has the setting, and the guard of `run.train`; other loops have one each. Knows nothing of
rollouts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.client.failures import Refused, Rewound, TrainingFailed
from launcher.client.schema import NO_VARIANCE, StepCounts, StepStatus

# Unless a program gives another number (`connect(max_empty_steps=…)`).
MAX_EMPTY_STEPS = 3
MAX_REWINDS = 3
# Steps of groups that were gathered before a loss tell of it again, so many at most.
MAX_LATE_STEPS = 32

_NOTHING_TO_TRAIN = "nothing_to_train"


@dataclass(frozen=True)
class NothingToTrain:
    """The runtime's answer to a step of which nothing can be trained: the reason, counts by reason, and the
    metrics of its rewards.

    `was_queued`: the step had its place among the others, and its client_state is that of the run now.
    """

    why: str
    counts: StepCounts
    metrics: dict[str, float] = field(default_factory=dict)
    was_queued: bool = False

    @classmethod
    def of(cls, refused: Refused) -> NothingToTrain:
        """Raises the error again when it says anything else."""
        if refused.code != _NOTHING_TO_TRAIN:
            raise refused
        counts = StepCounts.model_validate(refused.error.get("counts") or {})
        return cls(refused.why or refused.message, counts)

    @classmethod
    def of_step(cls, status: StepStatus) -> NothingToTrain | None:
        """None for a step that is not empty."""
        if status.state != "empty":
            return None
        return cls(status.error or "it is empty", status.counts, status.metrics, was_queued=True)


@dataclass
class NoProgressGuard:
    """Counts the steps in a row that had nothing to train, and the losses of the machine in a row.

    After it has raised it counts anew: a program may go on. Safe to use from several threads.
    """

    max_empty_steps: int = MAX_EMPTY_STEPS
    _empty: int = field(default=0, init=False)
    _rewinds: int = field(default=0, init=False)
    # The run's step when the last one was empty, if that was told.
    _after_step: int | None = field(default=None, init=False)
    # The last loss of the machine, and how many late steps have told of it.
    _loss: object = field(default=None, init=False)
    _late: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def trained(self) -> None:
        """A step was trained."""
        with self._lock:
            self._empty = self._rewinds = 0

    def empty(
        self, why: str, hint: str, after_step: int | None = None, counts: StepCounts | None = None
    ) -> None:
        """Nothing of a step could be trained. Raises TrainingFailed when it was one too many.

        `after_step`: the run's newest step, by which another loop's steps in between are noticed. `counts`:
        the step's; if only its rewards were equal, both counts begin anew.
        """
        if counts is not None and counts.dropped.get(NO_VARIANCE):
            self.trained()
            return
        with self._lock:
            if after_step is not None and after_step != self._after_step:
                self._empty, self._after_step = 0, after_step
            self._empty += 1
            if self._empty < self.max_empty_steps:
                return
            count, self._empty = self._empty, 0
        raise TrainingFailed(
            f"Nothing could be trained in {count} {'step' if count == 1 else 'steps'} in a row",
            why,
            f"{hint}; connect(max_empty_steps=N) allows more",
        ) from None

    def rewound(self, rewound: Rewound, *, may_be_late: bool = False) -> None:
        """The machine was lost. Raises TrainingFailed when it was one time too many.

        `may_be_late`: the step's groups may have been gathered before the last loss that was told, so that
        it is told again.
        """
        with self._lock:
            loss = rewound.error.get("lost_at")
            if may_be_late and loss is not None and loss == self._loss and self._late < MAX_LATE_STEPS:
                self._late += 1
                return
            self._loss, self._late = loss, 0
            self._rewinds += 1
            if self._rewinds < MAX_REWINDS:
                return
            self._rewinds = 0
        raise TrainingFailed(
            f"The run was rewound {MAX_REWINDS} times without a step in between",
            rewound.why,
            "`launch status` shows the run; its log says why the machine keeps being lost",
        ) from rewound


def check_max_empty_steps(count: int) -> int:
    """Raises ValueError for a number that no training could go on with."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"max_empty_steps is a whole number of at least 1, not {count!r}")
    return count


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Counts by reason in words: `3 × no reward, 1 × too old`."""
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
