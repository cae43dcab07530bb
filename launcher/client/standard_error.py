"""The standard error of a mean, which every ± of ours is.

Neighbours: `dspy/report.py` has it in a step's line, `dspy/validation.py` and `trajectories/log_groups.py` in
a validation's. Pure: knows nothing of programs or of the wire.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def of_mean(values: Sequence[float]) -> float:
    """The standard error of the mean of independent draws; NaN for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def of_groups(groups: Iterable[Sequence[float]]) -> float:
    """The standard error of the mean of all values, where the G groups are the independent draws.

    Rollouts of one example are alike, so their number does not make the mean more certain. With the sums S_g,
    the sizes n_g, N of all and the mean m: sqrt(G / (G - 1) * sum((S_g - n_g * m)²)) / N, the estimate for
    means of clusters (Cochran, Sampling Techniques, 1977, section 11.8). Of groups of one size it is
    `of_mean` of the groups' means. NaN for fewer than two groups.
    """
    filled = [it for it in groups if it]
    if len(filled) < 2:
        return math.nan
    count = sum(map(len, filled))
    mean = math.fsum(value for it in filled for value in it) / count
    squares = math.fsum((math.fsum(it) - len(it) * mean) ** 2 for it in filled)
    return math.sqrt(len(filled) / (len(filled) - 1) * squares) / count
