"""The durability of a run: its newest committed step, its newest durable step, and the bound between.

Neighbours: `results/durable.py` reads it, `results/background_copy.py` keeps the bound, `run/work.py` shows
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# How many committed steps may not be durable yet.
MAX_STEPS_BEHIND = 1


@dataclass(frozen=True)
class DurabilityStatus:
    """The newest committed and the newest durable step, None before the first; the bound between them.

    `trouble`: why the last attempt to make a step durable failed.
    """

    committed: int | None = None
    durable: int | None = None
    bound_steps: int = MAX_STEPS_BEHIND
    trouble: str | None = None

    @property
    def steps_behind(self) -> int:
        """How many committed steps the loss of the machine would cost now."""
        return max(0, (self.committed or 0) - (self.durable or 0))

    def to_dict(self) -> dict[str, Any]:
        """The keys of `--json`."""
        return {
            "committed_step": self.committed,
            "durable_step": self.durable,
            "durable_bound_steps": self.bound_steps,
        }

    def describe(self) -> str:
        """For people: "committed step 12, durable step 11 (at most 1 behind)"."""
        if self.committed is None and self.durable is None:
            return "no step yet"
        committed = "nothing committed" if self.committed is None else f"committed step {self.committed}"
        durable = "nothing durable" if self.durable is None else f"durable step {self.durable}"
        late = "" if self.steps_behind <= self.bound_steps else f", {self.steps_behind} behind"
        return f"{committed}, {durable} (at most {self.bound_steps} behind{late})"
