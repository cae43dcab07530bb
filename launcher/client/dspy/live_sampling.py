"""Whether requests outside any rollout may be trained: only while DSPy's own GRPO samples.

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

    `asked` replaces the LM's settings: trained answers are sampled from the policy as it is (C9).
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False


_calling: ContextVar[LiveSampling | None] = ContextVar("slipway_sampling", default=None)


def current_sampling() -> LiveSampling | None:
    """The job that a request made here and now is sampled for, or None."""
    sampling = _calling.get()
    return None if sampling is None or sampling.is_over else sampling


@contextmanager
def sampling_for_job(sampling: LiveSampling | None) -> Iterator[None]:
    """An LM is asked that belongs to this job, or to none."""
    token = _calling.set(sampling)
    try:
        yield
    finally:
        _calling.reset(token)
