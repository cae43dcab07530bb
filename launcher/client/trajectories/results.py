"""The results of training and logging trajectories, awaited or not.

Neighbours: `train_groups.py` and `log_groups.py` make these, `session.py` hands them to the program. Knows
nothing of their making.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class _AwaitableResult:
    """A result that may be awaited too: `run.train(...)` and `await run.train(...)` are both right."""

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


@dataclass(frozen=True)
class StepResult(_AwaitableResult):
    """The counts of everything in the groups: `trained`, and the rest in `dropped` by its reason.

    The two together are the choices of all trajectories, the trajectories that have none, and the
    exceptions. `step` and `version` are None if nothing could be trained: then no step was taken, and the
    third time in a row is an error (`connect(max_empty_steps=…)`), unless rewards were only equal.
    """

    step: int | None = None
    version: int | None = None
    trained: int = 0
    # Answers that continue the sequence of the one before, and how often a sequence had to begin anew.
    joined: int = 0
    sealed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    groups_without_variance: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged(_AwaitableResult):
    """The logged line of `history.jsonl`, and the folder with it, if the run has one."""

    line: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
