"""A warning for each reason that dropped more than half of a step's answers, once each, with advice.

Neighbour: `steps.py` tells it each step that is settled, whichever program trains. Every step's counts are in
its status; this line is for users who do not look at them. Groups without variance are left out of healthy
steps too, early and late in a training: they are reported only if nothing of the step was trained.
"""

from __future__ import annotations

import re
import sys

from launcher.base.sanitize import one_line as sanitized
from launcher.client.schema import NO_VARIANCE, StepCounts, StepStatus

_MIN_SHARE = 0.5
# By the beginning of a reason: the setting that changes it.
_ADVICE = (
    (
        "truncated",
        "give answers more room (max_tokens), or train them as they are: train.overlong=keep or soft",
    ),
    (
        NO_VARIANCE,
        "all rewards of a group are equal; more rollouts of an example, a finer reward or dynamic_sampling "
        "finds differences",
    ),
    ("stale", "a smaller staleness, or launch --set max_staleness=N, keeps them"),
    ("answer not received", "its client left before the answer came: give it a longer time-out"),
    ("no sample", "these rollouts asked the policy nothing, or under other ids than were rewarded"),
)
_DEFAULT_ADVICE = (
    "more: launch logs RUN --which gateway; rollouts/ of the run's folder has each answer with its reason"
)


class DroppedSampleWarnings:
    """The warnings about one run's steps: each reason is reported once."""

    def __init__(self) -> None:
        self._reported = set[str]()

    def report_step(self, status: StepStatus) -> None:
        """A step is settled."""
        counts = status.counts
        reason = main_reason(counts)
        kind = re.sub(r"\d+", "", reason or "")  # a program's own words may have the time of day in them
        if reason is None or kind in self._reported:
            return
        self._reported.add(kind)
        changed_by = next((it for begins, it in _ADVICE if reason.startswith(begins)), _DEFAULT_ADVICE)
        step = "an empty step" if status.state == "empty" else f"step {status.id}"
        dropped = f"{counts.dropped[reason]} of {_answer_count(counts)} answers of {step}"
        sys.stderr.write(f"slipway: {dropped} are left out: {sanitized(reason)} ({changed_by})\n")
        sys.stderr.flush()


def main_reason(counts: StepCounts) -> str | None:
    """The reason that more than half of a step was left out for; None if there is none to report."""
    reason, count = max(counts.dropped.items(), key=lambda it: it[1], default=("", 0))
    if count <= _MIN_SHARE * _answer_count(counts) or (reason.startswith(NO_VARIANCE) and counts.trained > 0):
        return None
    return reason


def _answer_count(counts: StepCounts) -> int:
    return max(counts.samples, sum(counts.dropped.values()) + counts.trained)
