"""The first step of which more than half was left out for one reason is said, with what changes it.

Neighbour: `session.py` asks for each step that is settled, whichever program trains. Every step's counts are
in its status; this is the one line for who does not look at them. Knows nothing of steps or of the wire.
"""

from __future__ import annotations

import re

from launcher.client.bodies import StepCounts

_MOST = 0.5
# By what a reason begins with: the setting that changes it.
_CHANGED_BY = (
    (
        "truncated",
        "give answers more room (max_tokens), or train them as they are: train.overlong=keep or soft",
    ),
    (
        "no variance",
        "all rewards of a group are equal; more rollouts of an example, a finer reward or dynamic_sampling "
        "finds differences",
    ),
    ("stale", "a smaller staleness, or launch --set max_staleness=N, keeps them"),
    ("answer not received", "its client left before the answer came: give it a longer time-out"),
    ("no sample", "these rollouts asked the policy nothing, or under other ids than were rewarded"),
)
_ELSE = (
    "launch logs RUN --which gateway has more, and rollouts/ of the run's folder each answer with its reason"
)


def warning(step: int, counts: StepCounts) -> str | None:
    """One line of a step, or None where no one reason has more than half of it."""
    reason, count = max(counts.dropped.items(), key=lambda it: it[1], default=("", 0))
    of = max(counts.samples, sum(counts.dropped.values()) + counts.trained)
    if count <= _MOST * of:
        return None
    changed_by = next((it for begins, it in _CHANGED_BY if re.match(begins, reason)), _ELSE)
    return f"{count} of {of} answers of step {step} are left out: {reason} ({changed_by})"
