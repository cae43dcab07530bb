"""The rollouts in progress, across the bounds of steps, in threads: drives the scheduler.

Neighbours: `../scheduler.py` decides which groups are begun, taken and dropped as stale;
`rollout_collector.py` makes groups, `workers.py` do the runs, `training.py` takes steps out. Knows nothing of
examples, rewards or the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from launcher.client.dspy.rollout_group import RolloutGroup
from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.dspy.step_keys import Key, StepKeys
from launcher.client.dspy.workers import BackgroundCall, Workers
from launcher.client.scheduler import Bounds, Cursor, RolloutScheduler

_Awaited = TypeVar("_Awaited")


@dataclass(frozen=True)
class ReadyGroups:
    """The groups of one step, the oldest first, and those that were left out since the step before.

    `outstanding`: where to go on after it; None if that follows from the number of steps.
    """

    groups: list[RolloutGroup]
    stale: list[RolloutGroup]
    outstanding: Cursor[Key] | None


class RolloutPool:
    """`make` makes a group by its key. A step has up to `most_extra` groups in place of those without
    variance. Its user is one thread.

    Only `begin_allowed` may be called from others.
    """

    def __init__(
        self,
        bounds: Bounds,
        most_extra: int,
        workers: Workers[FinishedRun],
        make: Callable[[Key], RolloutGroup],
        cursor: Cursor[Key],
    ) -> None:
        self.workers = workers
        self._make = make
        self._keys = StepKeys(bounds.per_step, most_extra, Counter(dict(cursor.extras)))
        self._scheduler = RolloutScheduler(bounds, self._keys, self._begin, cursor)

    def begin_allowed(self, done: int) -> None:
        """Begin the groups that are allowed once `done` steps are done."""
        with self.workers.changed:
            self._scheduler.admit(done)

    def begin_allowed_after(self, done: int, awaited: Callable[[], _Awaited]) -> BackgroundCall[_Awaited]:
        """The same once `awaited`, called while runs go on, has returned. Its errors end the runs."""

        def wait() -> _Awaited:
            try:
                found = awaited()
            except BaseException as error:  # a Ctrl-C too: the waiting thread gets it, and it is raised again
                self.workers.fail(error)
                raise
            self.begin_allowed(done)
            return found

        return BackgroundCall(self.workers, wait)

    def take(
        self,
        done: int,
        newest: int | None,
        left_out: Callable[[], None] = lambda: None,
        is_served: bool = True,
    ) -> ReadyGroups:
        """The groups of the next step, once there are enough. Raises the errors of runs and of `left_out`.

        `newest`: the version that the step is trained on; None if nothing was trained that could make one
        older. `is_served`: whether it answers already; otherwise the groups after it wait for a
        `begin_allowed`. `left_out` is called when groups were left out and too few others are there: if the
        newest version is not served any more, every new group would be left out, for ever.
        """
        if is_served:
            self.begin_allowed(done)
        told = 0
        while True:
            with self.workers.changed:
                self._drop_stale(self._scheduler.open.values(), newest)
                self.workers.wait_until(partial(self._is_ready_or_stale, newest, told))
                if self._scheduler.is_ready():
                    groups, stale = self._scheduler.take()
                    return ReadyGroups(groups, stale, self._keys.resumable(self._scheduler.cursor()))
                told = len(self._scheduler.stale)
            left_out()

    def end(self) -> list[RolloutGroup]:
        """No run is in progress from here on: the groups that were begun, and are in no step."""
        with self.workers.changed:
            self.workers.stop()
            left = [*self._scheduler.open.values(), *self._scheduler.stale]
            self._abandon(left)
            return left

    def _begin(self, key: Key) -> RolloutGroup:
        group = self._make(key)
        for job in group.jobs:
            job.on_done = partial(self._job_ended, group)
        self.workers.add(group.jobs)
        return group

    def _job_ended(self, group: RolloutGroup) -> None:
        """Told by the workers while nothing else changes."""
        if all(job.is_done for job in group.jobs) and group.key in self._scheduler.open:
            group.ended = group.judge()
            self._scheduler.ended(group, group.ended.zero_variance, len(group.jobs))

    def _is_ready_or_stale(self, newest: int | None, told: int) -> bool:
        self._drop_stale(self._scheduler.ended_groups(), newest)
        return self._scheduler.is_ready() or len(self._scheduler.stale) > told

    def _drop_stale(self, groups: Iterable[RolloutGroup], newest: int | None) -> None:
        if stale := self._scheduler.drop_stale(groups, newest):
            self._abandon(stale)
            self._scheduler.fill()

    def _abandon(self, groups: list[RolloutGroup]) -> None:
        for group in groups:
            group.end()
        self.workers.abandon([job for group in groups for job in group.jobs])
