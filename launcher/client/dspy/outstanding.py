"""The examples that are still to be rolled out at a place, by the names of their tickets.

A ticket is named by the step it was planned for and its place there (0 to E-1 the step's own examples, from E
on those rolled out besides), whatever step it is trained in. Neighbours: `rollout_pool.py` has the
outstanding tickets and begins them, `training_place.py` keeps it. Knows nothing of examples or runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]
"""The planned step, and the place in it."""


@dataclass(frozen=True)
class Outstanding:
    """The tickets to roll out at a place: `tickets`, then the steps' own from number `next` on.

    Own ticket `e` of step `s` has the number `s * E + e`. `extras`: by planned step, how many examples were
    rolled out besides its own.
    """

    next: int
    tickets: tuple[Key, ...] = ()
    extras: Mapping[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The place as JSON."""
        return {
            "next": self.next,
            "tickets": [list(it) for it in self.tickets],
            "extras": {str(step): count for step, count in self.extras.items()},
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Outstanding:
        """Read the result of `to_dict`."""
        return cls(
            state["next"],
            tuple((step, index) for step, index in state["tickets"]),
            {int(step): count for step, count in state["extras"].items()},
        )
