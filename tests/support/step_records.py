"""A step's record of a few figures, by the names of the alarms that look at them.

Neighbours: `launcher/client/step_record.py` has the record. Without DSPy, for tests of both halves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.client.alarms import StalenessBucket
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.step_record import StepRecord, StepRollouts

_GROUPS, _ANSWERS, _TOKENS = 100, 100, 10_000.0


_ROLLOUTS = ("length", "repetition", "reward_length", "reward_repetition")


def step_record(
    step: int,
    rewards: Sequence[float] = (),
    *,
    flat_groups: float | None = None,
    truncation: float = float("nan"),
    masked: float | None = None,
    masked_answers: float | None = None,
    lags: Mapping[int, StalenessBucket] | None = None,
    **figures: Any,
) -> StepRecord:
    """`figures`: others of its rollouts by their name, and metrics of the trainer."""
    rollouts = {name: figures.pop(name) for name in _ROLLOUTS if name in figures}
    metrics = {name: value for name, value in figures.items() if value is not None}
    if masked is not None:
        metrics |= {"trained_tokens": _TOKENS, "masked_tokens": masked * _TOKENS}
    if masked_answers is not None:
        metrics["masked_sequences"] = masked_answers * _ANSWERS
    for lag, it in (lags or {}).items():
        found = {"trained_tokens": it.tokens, "clip_fraction": 0.0, "masked_tokens": it.stopped}
        found["kl_behaviour"] = it.kl / it.tokens
        metrics |= {f"lag{lag}/{name}": value for name, value in found.items()}
    flat = 0 if flat_groups is None else round(flat_groups * _GROUPS)
    groups = 0 if flat_groups is None else _GROUPS
    counts = StepCounts(groups=groups, groups_without_variance=flat, trained=_ANSWERS)
    return StepRecord(
        step,
        0,
        StepRollouts({"self": rewards}, cut_off_rate=truncation, **rollouts),
        StepStatus(id=step, key="key", state="published", version=step, counts=counts, metrics=metrics),
    )
