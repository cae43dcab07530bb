"""A trained step as alarms look at it: measured on the answers, on the groups and by the trainer.

Neighbours: `training.py` asks after each step, `alarms.py` judges. Knows nothing of thresholds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from launcher.client.bodies import StepStatus
from launcher.client.dspy.alarms import AtLag, Observed
from launcher.client.dspy.grouping import Grouped
from launcher.client.dspy.rollouts import Finished

_LAG = re.compile(r"lag(\d+)/trained_tokens")


def observe(
    step: int, finished: Sequence[Finished], grouped: Grouped, cut_off_rate: float, status: StepStatus
) -> Observed:
    """What there is to see of step `step` (1 is the first)."""
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
        lags=by_lag(metrics),
    )


def by_lag(metrics: Mapping[str, float]) -> dict[int, AtLag]:
    """What the bounds stopped, by how many steps old it was; a runtime from before says nothing of lags."""
    found: dict[int, AtLag] = {}
    for name, tokens in metrics.items():
        lag = _LAG.fullmatch(name)
        clipped = metrics.get(f"lag{lag[1]}/clip_fraction") if lag else None
        if lag and clipped is not None:
            masked = metrics.get(f"lag{lag[1]}/masked_tokens", 0.0)
            found[int(lag[1])] = AtLag(tokens, clipped * tokens + masked)
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
