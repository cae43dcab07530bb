"""One example's rollouts: the runs of its group, and their result.

Neighbours: `rollout_pool.py` begins groups and takes them out, `rollout_collector.py` makes and judges them,
`step_keys.py` has their keys. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.client.dspy.grouping import GroupingResult
from launcher.client.dspy.rollouts import FinishedRun, ProgramRun
from launcher.client.dspy.step_keys import Key
from launcher.client.dspy.workers import WorkerTask


@dataclass(frozen=True)
class Ended:
    """The result of a group. `zero_variance`: all its rewards are known and equal, so that it teaches
    nothing.

    `oldest`: the oldest policy version that has answered in it, None if none has.
    """

    finished: Sequence[FinishedRun]
    grouped: GroupingResult
    zero_variance: bool
    oldest: int | None


@dataclass(eq=False)
class RolloutGroup:
    """One example's runs. `judge` is called once they have all ended.

    `has_ended` and `replaced` are the scheduler's: see `ScheduledGroup`.
    """

    key: Key
    runs: Sequence[ProgramRun]
    jobs: Sequence[WorkerTask[FinishedRun]]
    judge: Callable[[], Ended]
    # The predictors whose answers count for its age.
    predictors: frozenset[str]
    ended: Ended | None = None
    has_ended: bool = False
    replaced: bool = False

    def oldest(self) -> int | None:
        """The oldest policy version that has answered in it so far."""
        if self.ended is not None:
            return self.ended.oldest
        return min((it for run in self.runs for it in run.rollout.versions_of(self.predictors)), default=None)

    @property
    def begun(self) -> int:
        """How many of its runs have begun."""
        return sum(job.started_at is not None for job in self.jobs)

    def end(self) -> None:
        """Its programs ask in vain from here on."""
        for run in self.runs:
            run.rollout.end()
