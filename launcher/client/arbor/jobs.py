"""The trainings of this process as Arbor's jobs: each has an id, can be followed, and can be stopped.

Neighbours: `optimizer.py` makes one a compile and ends it, `job_watching.py` finds it by its id. Knows
nothing of DSPy or HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_lock = threading.Lock()
_jobs: dict[str, Job] = {}


@dataclass
class Job:
    """One compile. `history` grows while it trains; `checkpoints`, by Arbor's names, are there at its end."""

    id: str
    steps: int
    history: Sequence[dict[str, Any]] = ()
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_checkpoint: str | None = None
    # Somebody wants no more steps.
    is_cancelled: threading.Event = field(default_factory=threading.Event, repr=False)
    is_over: threading.Event = field(default_factory=threading.Event, repr=False)
    failure: str | None = None

    @property
    def status(self) -> str:
        """The status in OpenAI's words, as Arbor has them."""
        if not self.is_over.is_set():
            return "running"
        if self.failure is not None:
            return "failed"
        return "cancelled" if self.is_cancelled.is_set() else "succeeded"


def add(job: Job) -> None:
    """From now on it is found by its id."""
    with _lock:
        _jobs[job.id] = job


def find(job_id: str) -> Job | None:
    """The job of this process with this id."""
    with _lock:
        return _jobs.get(job_id)


def ids() -> list[str]:
    """The ids of all jobs of this process, the oldest first."""
    with _lock:
        return list(_jobs)
