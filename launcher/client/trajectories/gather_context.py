"""The counts of a gathering in progress, shown as one line on a terminal and not at all elsewhere.

Neighbours: `gathering.py` begins one, the groups that are awaited within it report to it; `members.py` reads
a trajectory. Knows nothing of groups.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from launcher.client.trajectories.members import get_field, to_float

_LINE_WIDTH = 110


@dataclass
class GatherContext:
    """One gathering. `max_exceptions`: so many are data, one more ends it; below 1, that share of `total`."""

    max_exceptions: float = 0
    total: int = 0
    # The beginning of the line; None for none.
    description: str | None = None
    max_metrics: int | None = None
    done: int = 0
    exceptions: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    _is_shown: bool = False

    def add(self, trajectory: Any) -> None:
        """Count a trajectory. Raises TypeError for an object that is none."""
        if get_field(trajectory, "messages_and_choices") is None:
            came = "nothing" if trajectory is None else f"a {type(trajectory).__name__}"
            raise TypeError(f"a rollout must return its Trajectory, and one returned {came}")
        self.done += 1
        measured = {"reward": get_field(trajectory, "reward"), **(get_field(trajectory, "metrics") or {})}
        for name, value in measured.items():
            if (number := to_float(value)) is not None:
                self.sums[name] += number
                self.counts[name] += 1
        self._show()

    def count_exception(self) -> bool:
        """Count an exception; whether it is one too many."""
        self.exceptions += 1
        self._show()
        most = self.max_exceptions * self.total if 0 < self.max_exceptions < 1 else self.max_exceptions
        return self.exceptions > most

    def line(self) -> str:
        """How far it is, and the averages so far."""
        names = [*self.counts][: self.max_metrics]
        parts = [f"{name}={self.sums[name] / self.counts[name]:.3g}" for name in names]
        parts += [f"exceptions={self.exceptions}"] if self.exceptions else []
        return f"{self.description}: {self.done}/{self.total} {' '.join(parts)}".rstrip()

    def end_line(self) -> None:
        """Start a new line with its own averages."""
        self.close()
        self.sums.clear()
        self.counts.clear()

    def close(self) -> None:
        """End the line."""
        if self._is_shown:
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._is_shown = False

    def _show(self) -> None:
        if self.description is None or not _is_interactive():
            return
        self._is_shown = True
        sys.stderr.write(f"\r{self.line()[:_LINE_WIDTH]:<{_LINE_WIDTH}}")
        sys.stderr.flush()


@dataclass
class GroupContext(GatherContext):
    """One group's part of a gathering, that may leave it: counted by itself, and in the `whole`."""

    whole: GatherContext = field(default_factory=GatherContext)

    def __post_init__(self) -> None:
        self.whole.total += self.total

    def add(self, trajectory: Any) -> None:
        self.whole.add(trajectory)
        self.done += 1

    def count_exception(self) -> bool:
        self.exceptions += 1
        return self.whole.count_exception()

    def leave(self) -> None:
        """Take it out of the whole: the trajectories that have come, and those that still come."""
        self.whole.total -= self.total
        self.whole.done -= self.done
        self.whole.exceptions -= self.exceptions
        self.whole = GatherContext(math.inf)


def _is_interactive() -> bool:
    """Whether a line that is written over can be seen: on a terminal, and in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


_current: ContextVar[GatherContext | None] = ContextVar("gather_context", default=None)


def current_context() -> GatherContext:
    """That of the gathering around; alone, one that takes no exception."""
    return _current.get() or GatherContext()


@contextlib.contextmanager
def use_context(context: GatherContext) -> Iterator[GatherContext]:
    """Trajectories awaited inside are counted in `context`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
        context.close()
