"""The bound on an answer's age in steps when it is trained: checks a program's bound against its run's.

Neighbours: all code that rolls out ahead of the training asks. Knows nothing of how that is done.
"""

from __future__ import annotations

from launcher.client.failures import TrainingFailed
from launcher.client.launch_line import hint_of_fitting_run


def check_integers(**values: int) -> None:
    """Raise ValueError for one that is no whole number: a program need not have types."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is a whole number, not {value!r}")


def check_staleness(staleness: int, max_staleness: int | None) -> None:
    """Raise TrainingFailed if the run leaves out answers of this age. `max_staleness` None: unknown."""
    if max_staleness is not None and staleness > max_staleness:
        raise TrainingFailed(
            f"This run cannot train with staleness={staleness}",
            why=f"it leaves out what was sampled more than {max_staleness} steps ago",
            hint=hint_of_fitting_run(f"--set max_staleness={staleness}"),
        )
