"""The measurements of a trained step for the alarms: of the answers, of the groups and by the trainer.

Neighbours: `training.py` asks after each step, `alarms.py` judges. Knows nothing of thresholds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from launcher.client.alarms import Observed, StalenessBucket
from launcher.client.dspy.grouping import GroupingResult
from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.schema import StepStatus

_LAG = re.compile(r"lag(\d+)/trained_tokens")


def collect_metrics(
    step: int,
    finished: Sequence[FinishedRun],
    grouped: GroupingResult,
    cut_off_rate: float,
    status: StepStatus,
) -> Observed:
    """The metrics of step `step` (1 is the first)."""
    counts, metrics = status.counts, status.metrics
    rollouts = [it.run.rollout for it in finished]
    return Observed(
        step,
        rewards=[reward for rewards in grouped.rewards.values() for reward in rewards],
        flat_groups=counts.groups_without_variance / counts.groups if counts.groups else None,
        length=_mean(tokens for it in rollouts for tokens in it.lengths),
        outside=_mean(it.outcome == "outside" for it in finished),
        repetition=_mean(share for it in rollouts for share in it.repeated),
        truncation=cut_off_rate,
        entropy=metrics.get("entropy"),
        kl_behaviour=metrics.get("kl_behaviour"),
        kl_reference=metrics.get("kl_reference"),
        masked=_share(metrics.get("masked_tokens"), metrics.get("trained_tokens")),
        masked_answers=_share(metrics.get("masked_sequences"), counts.trained),
        ratio_max=metrics.get("ratio_max"),
        lags=staleness_buckets(metrics),
    )


def staleness_buckets(metrics: Mapping[str, float]) -> dict[int, StalenessBucket]:
    """The metrics by staleness in steps; an older runtime does not send them."""
    found: dict[int, StalenessBucket] = {}
    for lag in (int(it[1]) for it in map(_LAG.fullmatch, metrics) if it):
        names = ("trained_tokens", "clip_fraction", "masked_tokens", "kl_behaviour")
        values = [metrics.get(f"lag{lag}/{name}") for name in names]
        if None not in values:
            tokens, clipped, masked, kl = (it for it in values if it is not None)
            found[lag] = StalenessBucket(tokens, clipped * tokens + masked, kl * tokens)
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
