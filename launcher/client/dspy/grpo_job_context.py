"""Tells whether requests outside any rollout may be trained: only while a job of DSPy's own GRPO samples.

An untagged request is an evaluation, a prompt optimizer's attempt or a judge's: never training material, and
never a match for a group given as text (C48). The exception is the LM that a ReinforceJob trains, while it
does, because DSPy's GRPO tags nothing. Its own validations use that same LM. The only difference from its
rollouts is that a group means the newest answer, and each answer only once.
Neighbours: `reinforce_job.py` begins and ends it, `lm.py` knows the calling LM, `engine.py` asks here. Knows
nothing of HTTP, steps or programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ActiveGrpoJob:
    """A job that samples now. Copies of its LM made meanwhile share it; BestOfN makes some within a rollout.

    `sampling_overrides` replace the LM's settings: trained answers come from the policy's own distribution
    (C9).
    """

    sampling_overrides: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False


_calling_job: ContextVar[ActiveGrpoJob | None] = ContextVar("slipway_grpo_job", default=None)


def active_job() -> ActiveGrpoJob | None:
    """The job that a request made here and now is sampled for, or None."""
    job = _calling_job.get()
    return None if job is None or job.is_over else job


@contextmanager
def requests_of_job(job: ActiveGrpoJob | None) -> Iterator[None]:
    """Requests in this block come from an LM that belongs to this job, or to none."""
    token = _calling_job.set(job)
    try:
        yield
    finally:
        _calling_job.reset(token)
