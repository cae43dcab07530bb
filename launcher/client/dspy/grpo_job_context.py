"""The job of DSPy's own GRPO that a request is made for, in a context variable: its requests can be trained.

A request without rollout tags is an evaluation, a prompt optimizer's attempt or a judge's. It is never
trained, and never matched with a group that is given as text (C48). The exception is the LM of a
ReinforceJob, as long as the job trains it, because DSPy's GRPO tags nothing. The job's own validations use
the same LM. Only the matching tells them from its rollouts: a group takes the newest answer, and each answer
once.
Neighbours: `reinforce_job.py` begins and ends a job, `lm.py` sets the variable for its LM's requests,
`engine.py` reads it. Knows nothing of HTTP, steps or programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ActiveGrpoJob:
    """A ReinforceJob that has begun. Copies of its LM share it, such as those that BestOfN makes in a
    rollout.

    `sampling_overrides`: request fields, such as the temperature, that replace the LM's own, because trained
    answers come from the policy's own distribution (C9). `is_over`: the job has ended, and copies of its LM
    that are still there sample as any other LM does.
    """

    sampling_overrides: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False


_calling_job: ContextVar[ActiveGrpoJob | None] = ContextVar("slipway_grpo_job", default=None)


def active_job() -> ActiveGrpoJob | None:
    """The job of the LM whose request is being made in this context; None outside a job, or after its end."""
    job = _calling_job.get()
    return None if job is None or job.is_over else job


@contextmanager
def requests_of_job(job: ActiveGrpoJob | None) -> Iterator[None]:
    """Requests in this block are made by this job's LM; None: by an LM that no job trains."""
    token = _calling_job.set(job)
    try:
        yield
    finally:
        _calling_job.reset(token)
