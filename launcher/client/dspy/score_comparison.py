"""Compares two validations, on the very examples that both have scored (C54).

Neighbours: `held_out.py` has the scores, `training_place.py` keeps the best's. Means of different examples
are never compared: one easy example scored is not better than two hard ones. Pure: knows nothing of programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Scores = Sequence[float | None]
"""One validation's score on each example, in their order; None where it has none."""

MIN_SCORED_SHARE = 0.5
"""Of all examples; a validation with fewer scores is not compared."""

# Kept in JSON: enough to tell scores apart, and the same before and after.
_DIGITS = 6


def rounded(scores: Scores) -> list[float | None]:
    """The scores as they are kept and compared."""
    return [None if it is None else float(f"{it:.{_DIGITS}g}") for it in scores]


def is_comparable(scores: Scores) -> bool:
    """Whether enough of the examples have a score."""
    return _enough_scored(sum(it is not None for it in scores), len(scores))


def mean_gain(scores: Scores, baseline: Scores) -> float | None:
    """The mean difference on the examples that both have scored; None if those are too few."""
    pairs = [
        (here, there)
        for here, there in zip(scores, baseline, strict=True)
        if here is not None and there is not None
    ]
    if not _enough_scored(len(pairs), len(scores)):
        return None
    # Summed exactly: equal sums are no gain.
    return math.fsum([here for here, _ in pairs] + [-there for _, there in pairs]) / len(pairs)


def _enough_scored(scored: int, of: int) -> bool:
    return scored > 0 and scored >= MIN_SCORED_SHARE * of
