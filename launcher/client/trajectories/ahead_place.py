"""A program's place among its groups: the number of steps taken, and the groups that are in none.

Neighbours: `ahead.py` begins from it and returns it with each step; a program keeps it in the step's `state`.
Knows nothing of a group's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """After `steps` steps all groups up to number `next` are taken or left out, except those of `again`."""

    steps: int = 0
    next: int = 0
    again: frozenset[int] = frozenset()

    def has(self, number: int) -> bool:
        """Whether this group is still to be rolled out."""
        return number >= self.next or number in self.again

    def to_dict(self) -> dict[str, Any]:
        """The place as JSON; merged into a state it leaves nothing of an earlier one."""
        return {"steps": self.steps, "next": self.next, "again": sorted(self.again)}

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> Place:
        """Read the result of `to_dict`; the beginning for None. Raises ValueError for anything else."""
        if saved and not {"steps", "next", "again"} <= set(saved):
            raise ValueError(f"a place is the `groups.place` of a step, and this has {sorted(saved)}")
        return cls(saved["steps"], saved["next"], frozenset(saved["again"])) if saved else cls()
