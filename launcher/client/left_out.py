"""A step of which more than half was left out for one reason is said once for each, with what changes it.

Neighbour: `steps.py` tells it each step that is settled, whichever program trains. Every step's counts are
in its status; this is the one line for who does not look at them. Groups without variance are left out of
healthy steps too, early and late in a training: they are said only where nothing of the step was trained.
"""

from __future__ import annotations

import re
import sys

from launcher.base.sanitize import one_line as sanitized
from launcher.client.bodies import StepCounts

_MOST = 0.5
_FLAT = "no variance"
# By what a reason begins with: the setting that changes it.
_CHANGED_BY = (
    (
        "truncated",
        "give answers more room (max_tokens), or train them as they are: train.overlong=keep or soft",
    ),
    (
        _FLAT,
        "all rewards of a group are equal; more rollouts of an example, a finer reward or dynamic_sampling "
        "finds differences",
    ),
    ("stale", "a smaller staleness, or launch --set max_staleness=N, keeps them"),
    ("answer not received", "its client left before the answer came: give it a longer time-out"),
    ("no sample", "these rollouts asked the policy nothing, or under other ids than were rewarded"),
)
_ELSE = "more: launch logs RUN --which gateway; rollouts/ of the run's folder has each answer with its reason"


class LeftOut:
    """Of one run's steps: each reason is said once."""

    def __init__(self) -> None:
        self._said = set[str]()

    def tell(self, step: int, counts: StepCounts) -> None:
        """A step is settled, and these are its counts."""
        reason = main_reason(counts)
        kind = re.sub(r"\d+", "", reason or "")  # a program's own words may have the time of day in them
        if reason is None or kind in self._said:
            return
        self._said.add(kind)
        changed_by = next((it for begins, it in _CHANGED_BY if reason.startswith(begins)), _ELSE)
        sys.stderr.write(
            f"slipway: {counts.dropped[reason]} of {_answers(counts)} answers of step {step} are left out: "
            f"{sanitized(reason)} ({changed_by})\n"
        )
        sys.stderr.flush()


def main_reason(counts: StepCounts) -> str | None:
    """The one for which more than half of a step was left out, where there is such a one to say."""
    reason, count = max(counts.dropped.items(), key=lambda it: it[1], default=("", 0))
    if count <= _MOST * _answers(counts) or (reason.startswith(_FLAT) and counts.trained > 0):
        return None
    return reason


def _answers(counts: StepCounts) -> int:
    return max(counts.samples, sum(counts.dropped.values()) + counts.trained)
