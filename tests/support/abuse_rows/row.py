"""A row of the table of what users do to an optimizer, and what rows of several files share.

Neighbours: the rows are in the other files of this folder; `../abuses.py` has the programs of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dspy

from launcher.client import TrainingFailed
from tests.support import abuses as a
from tests.support.small_run import Asked, SmallRun

# Two examples and four rollouts of each; the answers are `mot`, `motx`, `motxx` and `motxxx`.
ALL = {"scored": 8}
LENGTHS = {3.0, 4.0, 5.0, 6.0}


@dataclass(frozen=True)
class Abuse:
    """One row of the table.

    `says` is looked for in what the terminal and the exception say; `outcomes` is what became of the
    rollouts; `rewards` what was sent for them, None for a rollout that is excluded and counted. `exit` is
    `launch`'s: 6 when the program dies of it.
    """

    did: str
    program: Callable[[], Any] = a.predict
    metric: Callable[..., Any] = a.length
    answer: Callable[[Asked], Any] = a.varied
    adapter: Callable[[], dspy.Adapter] | None = None
    configured: Callable[[SmallRun], Any] | None = None
    trainset: Any = None
    valset: Any = None
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[SmallRun], None] = lambda run: None
    says: str = ""
    outcomes: Mapping[str, int] | None = None
    rewards: set[float | None] | None = None
    predictors: set[str] | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    exit: int = 0
    error: type[Exception] = TrainingFailed


def tagged_examples() -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot", tags=[]).with_inputs("english") for i in range(2)]


def drops_flat(run: SmallRun) -> None:
    run.drop_flat = True
