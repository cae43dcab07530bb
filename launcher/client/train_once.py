"""One step of a loop, taken once, and its end told to the loop's no-progress guard.

Each end of a step means the same to every loop that waits for its steps: those of `run.train`
(`trajectories/train_groups.py`), of ART (`art/art_training.py`, `art/sft.py`) and of DSPy's own jobs
(`dspy/reinforce_job.py`, `dspy/training_job.py`). `dspy/training.py` sends a step before the last one is
served, so it asks the guard itself. Neighbour: `no_progress.py`. Knows nothing of what a step is made of.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.client.failures import Refused, Rewound
from launcher.client.no_progress import NoProgressGuard, NothingToTrain
from launcher.client.schema import StepStatus


def train_once(
    take: Callable[[], StepStatus], guard: NoProgressGuard, *, may_be_late: bool = False
) -> StepStatus | NothingToTrain:
    """The step's status, or why nothing of it could be trained, which the loop counts (`guard.empty`).

    `take` sends the step and waits for it. Raises its errors; Rewound is counted first, so that it is
    TrainingFailed after too many. `may_be_late`: see `NoProgressGuard.rewound`.
    """
    try:
        status = take()
    except Rewound as rewound:
        guard.rewound(rewound, may_be_late=may_be_late)
        raise
    except Refused as refused:
        return NothingToTrain.of(refused)
    if nothing := NothingToTrain.of_step(status):
        return nothing
    guard.trained()
    return status
