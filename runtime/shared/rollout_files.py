"""The names of the files of rollout texts, on the machine and at home, and their order.

    step-000007.jsonl              the rollouts of step 7
    validation-000007-score.jsonl  those of a validation of version 7
    empty-000007-01.jsonl          those of the first step after step 7 of which nothing was trained

Neighbours: `gateway/steps/rollout_log.py` has their content and writes them; the launcher copies and shows
them.
"""

from __future__ import annotations

import re
from pathlib import Path

FILE = re.compile(r"(?P<kind>step|validation|empty)-(?P<step>\d{6,12})(?:-(?P<rest>[\w.-]{1,64}))?\.jsonl")
_KINDS = ("step", "validation", "empty")


def order_of(path: Path) -> tuple[int, ...]:
    """Sorts by the steps: a step's own, its validations, the empty steps after it by their number."""
    kind, step, *rest = path.stem.split("-", 2)
    empty = int(rest[0]) if kind == "empty" and rest and rest[0].isdecimal() else 0
    return int(step), _KINDS.index(kind), empty
