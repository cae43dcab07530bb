"""Tells when to renew the lease, how much of it is left, and when a deadline or budget is reached.

Neighbours: `runtime_monitor.py` renews, `run.py` asks for limits. Times are seconds on whatever clock the
caller uses: one that goes on while the computer sleeps (`clock.py`). Knows nothing of processes or of the
network. Pure, but for `wall_time`.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base import clock
from launcher.base.units import format_duration, format_money

_RENEWALS_PER_LEASE = 4
# The hint for a limit that was reached.
LONGER_LIMIT_HINT = "resume it, or run it again, with a longer --max or a larger --budget"


@dataclass(frozen=True)
class Lease:
    """A promise to be heard of again within `seconds`, last kept at `renewed_at`."""

    seconds: float
    renewed_at: float

    @property
    def renew_every(self) -> float:
        """Seconds between renewals: three may be lost."""
        return self.seconds / _RENEWALS_PER_LEASE

    def due(self, now: float) -> bool:
        return now - self.renewed_at >= self.renew_every

    def left(self, now: float) -> float:
        return max(0.0, self.seconds - (now - self.renewed_at))

    def renewed(self, now: float) -> Lease:
        return Lease(self.seconds, now)


@dataclass(frozen=True)
class Limits:
    """The limits of a run whose life began at `begun_at`: the life's time, and the run's money: this
    life's at `price_per_hour` US dollars, after `spent` in earlier lives."""

    begun_at: float
    deadline_seconds: float | None = None
    budget: float | None = None
    price_per_hour: float = 0.0
    spent: float = 0.0
    # For limits on the wall clock: the boot clock at `begun_at`, and the boot.
    begun_boot: float | None = None
    boot: str | None = None

    def wall_time(self) -> float:
        """The time now, by the wall clock of `begun_at`."""
        return clock.wall_time(self.begun_at, self.begun_boot, self.boot)

    def cost(self, now: float) -> float:
        """The cost of this life."""
        return self.price_per_hour * (now - self.begun_at) / 3600

    def deadline_left(self, now: float) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline_seconds is None else self.begun_at + self.deadline_seconds - now

    def left(self, now: float) -> float | None:
        """Seconds until the first of the two; None without either."""
        found = [
            seconds for seconds in (self.deadline_left(now), self._budget_left(now)) if seconds is not None
        ]
        return min(found) if found else None

    def _budget_left(self, now: float) -> float | None:
        if self.budget is None or self.price_per_hour <= 0:
            return None
        return (self.budget - self.spent - self.cost(now)) * 3600 / self.price_per_hour

    def reached(self, now: float) -> str | None:
        """The limit that is reached, in words."""
        left = self.deadline_left(now)
        if left is not None and left <= 0:
            return f"the deadline of {format_duration(self.deadline_seconds or 0)} is reached"
        if self.budget is not None and self.spent + self.cost(now) >= self.budget:
            return f"the budget of {format_money(self.budget)} is spent"
        return None


def is_limit(reason: str) -> bool:
    """Whether a run's reason, of this version or an older one, is a limit that it reached."""
    return reason.startswith(("the deadline", "the budget"))


NO_LIMITS = Limits(begun_at=0.0)
