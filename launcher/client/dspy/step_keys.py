"""The keys of a training's groups, and a scheduler's cursor over them as JSON.

A group is named by the step it was planned for and its place there (0 to E-1 the step's own examples, from E
on those rolled out besides), whatever step it is trained in. Neighbours: `rollout_pool.py` schedules by these
keys, `training_place.py` keeps the cursor. Knows nothing of examples or runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.client.scheduler import Cursor

Key = tuple[int, int]
"""The planned step, and the place in it."""


@dataclass
class StepKeys:
    """Own group `e` of step `s` has the number `s * per_step + e`. A step has up to `most_extra` others.

    `extras`: by planned step, how many of these were begun.
    """

    per_step: int
    most_extra: int
    extras: Counter[int]

    def planned(self, number: int) -> Key:
        return divmod(number, self.per_step)

    def after(self, key: Key) -> int:
        return key[0] * self.per_step + key[1] + 1 if key[1] < self.per_step else 0

    def replacement(self, key: Key, size: int, following: Key) -> Key | None:
        step = key[0]
        if self.extras[step] >= self.most_extra:
            return None
        self.extras[step] += 1
        return step, self.per_step + self.extras[step] - 1

    def resumable(self, cursor: Cursor[Key]) -> Cursor[Key] | None:
        """The cursor with the extras that still count; None if it follows from the number of steps."""
        left, current = {step for step, _ in cursor.again}, cursor.next // self.per_step
        extras = {step: n for step, n in sorted(self.extras.items()) if step in left or step >= current}
        found = replace(cursor, extras=extras)
        return None if found == Cursor(cursor.steps, cursor.steps * self.per_step) else found


def cursor_state(cursor: Cursor[Key]) -> dict[str, Any]:
    """The cursor as JSON, without its number of steps."""
    extras = {str(step): count for step, count in cursor.extras.items()}
    return {"next": cursor.next, "tickets": [list(it) for it in cursor.again], "extras": extras}


def cursor_of(state: Mapping[str, Any], steps: int) -> Cursor[Key]:
    """Read the result of `cursor_state`, kept after `steps` steps."""
    again = tuple((step, index) for step, index in state["tickets"])
    extras = {int(step): count for step, count in state["extras"].items()}
    return Cursor(steps, state["next"], again, extras)
