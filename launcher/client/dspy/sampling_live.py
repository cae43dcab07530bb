"""Whether what the policy is asked outside any rollout may be trained: while DSPy's own GRPO samples.

What nobody tagged is an evaluation, a prompt optimizer's attempt or a judge's word: no training material, and
never what a group given as text means (C48). The exception is the LM that a ReinforceJob trains, while it
does: DSPy's GRPO tags nothing. Its own validations ask that same LM, so nothing tells them apart from its
rollouts but that the newest answer is meant, and each only once.
Neighbours: `reinforce_job.py` begins and ends it, `lm.py` says which LM is calling, `engine.py` asks here.
Knows nothing of HTTP, steps or programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LiveSampling:
    """One job's: copies of its LM made meanwhile share it, as BestOfN makes some within a rollout.

    `asked` takes the place of what the LM says: what is trained was sampled from the policy as it is (C9).
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    over: bool = False


_calling: ContextVar[LiveSampling | None] = ContextVar("slipway_sampling", default=None)


def for_training() -> LiveSampling | None:
    """The job that what is asked here and now is sampled for, or None."""
    sampling = _calling.get()
    return None if sampling is None or sampling.over else sampling


@contextmanager
def calling(sampling: LiveSampling | None) -> Iterator[None]:
    """An LM is asked that belongs to this job, or to none."""
    token = _calling.set(sampling)
    try:
        yield
    finally:
        _calling.reset(token)
