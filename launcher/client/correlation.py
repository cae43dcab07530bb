"""How closely one figure of rollouts follows another among the tries of the same example.

Neighbours: `dspy/rollout_collector.py` has it of rewards with lengths and with repetition. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

Pair = tuple[float, float]


def within_groups(groups: Iterable[Sequence[Pair]]) -> float:
    """Pearson's correlation of the pairs, each value less its group's mean; NaN where either never varies.

    What differs between examples (a long question has a long answer) is no reason for it.
    """
    pairs = [pair for group in groups for pair in _centred(group)]
    together = math.fsum(one * other for one, other in pairs)
    spread = math.fsum(one * one for one, _ in pairs) * math.fsum(other * other for _, other in pairs)
    return together / math.sqrt(spread) if spread > 0 else math.nan


def _centred(group: Sequence[Pair]) -> list[Pair]:
    if not group:
        return []
    first, second = fmean(one for one, _ in group), fmean(other for _, other in group)
    return [(one - first, other - second) for one, other in group]
