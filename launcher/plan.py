"""What a run will use and the most it can cost, before anything starts. Pure: no files, no network.

Neighbours: `run.py` shows the plan and keeps to it, `config.py` gives the wishes.
A run on this computer costs nothing, whatever its budget.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from launcher.errors import UsageError
from launcher.settings import Settings
from launcher.units import format_duration, format_money

HERE = "this computer"


@dataclass(frozen=True)
class Plan:
    """Where, for how long, and for how much. Prices in US dollars."""

    where: str
    model: str
    price_per_hour: float
    deadline_seconds: float | None
    lease_seconds: float
    budget: float | None

    @property
    def cost_at_most(self) -> float | None:
        """The price until the deadline or the budget, whichever is less; None when nothing bounds it."""
        if self.price_per_hour == 0:
            return 0.0
        until_deadline = (
            None if self.deadline_seconds is None else self.price_per_hour * self.deadline_seconds / 3600
        )
        bounds = [bound for bound in (until_deadline, self.budget) if bound is not None]
        return min(bounds) if bounds else None

    def cost_after(self, seconds: float) -> float:
        """What `seconds` of this run cost."""
        return self.price_per_hour * seconds / 3600

    def describe(self) -> str:
        """One line: "tiny on this computer, $0.00/h, deadline 4h 00m"."""
        limit = (
            "no deadline"
            if self.deadline_seconds is None
            else f"deadline {format_duration(self.deadline_seconds)}"
        )
        return f"{self.model} on {self.where}, {format_money(self.price_per_hour)}/h, {limit}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cost_at_most": self.cost_at_most}


def make_plan(settings: Settings) -> Plan:
    """The plan for these settings. Raises UsageError for what this version does not rent."""
    for option, value in (("--gpus", settings.gpus), ("--infra", settings.infra)):
        if value is not None:
            raise UsageError(
                f"{option} {value}: renting GPUs is not in this version",
                "it runs on this computer; SkyPilot clusters, priced and confirmed first, come next",
                f"launch -- COMMAND   (the same run here, without {option})",
            )
    return Plan(
        where=HERE,
        model=settings.model,
        price_per_hour=0.0,
        deadline_seconds=settings.max_seconds,
        lease_seconds=settings.lease_seconds,
        budget=settings.budget,
    )
