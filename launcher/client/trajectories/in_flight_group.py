"""A group that is rolled out ahead of the training: its task, its answers' age, and its variance.

Neighbours: `ahead.py` begins it and takes it out, `gathering.py` awaits it. Knows nothing of other groups or
of steps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field

from launcher.client.trajectories.gather_context import GatherContext, GroupContext, use_context
from launcher.client.trajectories.gathering import AfterEach, expected_size, gather_group
from launcher.client.trajectories.members import choices_of, to_float, version_of
from launcher.client.trajectories.trajectory_group import TrajectoryGroup, close_unawaited


@dataclass(eq=False)
class InFlightGroup:
    """`key`: its number among those that were given. `since`: the version served when it began, if known.

    `has_ended` and `replaced` are the scheduler's: see `ScheduledGroup`. One that raised has not ended.
    """

    key: int
    since: int | None
    pending: Awaitable[TrajectoryGroup] | TrajectoryGroup
    after_each: AfterEach | None
    whole: GatherContext
    has_ended: bool = False
    replaced: bool = False
    task: asyncio.Task[list[TrajectoryGroup]] = field(init=False)

    def __post_init__(self) -> None:
        self._part = GroupContext(total=expected_size(self.pending), whole=self.whole)
        self.task = asyncio.create_task(self._gathered())
        # One that is cancelled before it began has begun none of its coroutines.
        self.task.add_done_callback(lambda _: close_unawaited(self.pending))

    async def _gathered(self) -> list[TrajectoryGroup]:
        with use_context(self._part):
            return await gather_group(self.pending, self.after_each)

    def leave(self) -> None:
        """Its gathering no longer counts it; its exceptions are ignored."""
        self._part.leave()
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def came(self) -> int:
        """How many trajectories of it have come."""
        return self._part.done

    @property
    def size(self) -> int:
        return self._part.total

    @property
    def groups(self) -> list[TrajectoryGroup]:
        """Its groups. Raises a rollout's exception that is one too many."""
        return self.task.result()

    def versions(self) -> Counter[int]:
        """The number of its answers by version. Older versions than `since` were requested by name."""
        choices = (it for group in self.groups for one in group for it in choices_of(one))
        versions = (version_of(it) for it in choices)
        return Counter(it for it in versions if it is not None and it >= (self.since or 0))

    def oldest(self) -> int | None:
        """No answer in it is older than this version, as far as is known: in progress, it may be as old."""
        answered = self.versions() if self.has_ended else ()
        return min(answered, default=self.since)

    def has_zero_variance(self) -> bool:
        """Whether it teaches nothing: its rewards are all equal, or `after_each` left it out.

        Unknown, so False, for a group without any rewards (a judge was away).
        """
        return all(map(_has_zero_variance, self.groups))


def _has_zero_variance(group: TrajectoryGroup) -> bool:
    rewards = (to_float(one.reward) for one in group)
    return len({it for it in rewards if it is not None and math.isfinite(it)}) == 1
