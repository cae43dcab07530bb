"""`train_kwargs` of DSPy's weight optimizers: the keywords that the run resolves, and the notes on them.

Neighbours: `training_job.py` and `reinforce_job.py` ask; `client/train_kwargs.py` asks the run. Keywords for
the amount of training are taken out here: they belong to the job that makes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.client.session import Session
from launcher.client.train_kwargs import ResolvedTrainKwargs, resolve

# Keywords that DSPy itself adds, and those that the jobs here read themselves.
_READ_BY_JOBS = frozenset(
    {
        "num_generations",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "seed",
    }
)


def resolve_for_job(
    session: Session, train_kwargs: Mapping[str, Any], say: Callable[[str], Any], steps: int | None = None
) -> ResolvedTrainKwargs:
    """Resolve the keywords on the run; each note is logged. `steps`: their number, if it is known.

    Raises the errors of `resolve`: TrainingFailed if the run would have to be another one.
    """
    kwargs = {name: value for name, value in train_kwargs.items() if name not in _READ_BY_JOBS}
    found = resolve(session.connection, kwargs, steps, strict=False)
    for note in found.notes:
        say(note)
    return found
