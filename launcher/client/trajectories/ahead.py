"""Steps of groups, rolled out while others are trained: as many in progress as allowed, none too old.

    async for groups in gather_ahead(run, scenarios, per_step=8, steps=100, staleness=1):
        await run.train_async(groups, state={"place": groups.place})

Drives the scheduler in asyncio, with the rules of `GRPO(staleness=N)`. Neighbours: `../scheduler.py` decides
which groups are begun, taken and left out; `in_flight_group.py` is a group in progress, `gathering.py` is the
barrier. Knows nothing of a rollout's making or a step's training.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.failures import Rewound
from launcher.client.scheduler import Bounds, Cursor, RolloutScheduler, max_extra_rollouts
from launcher.client.schema import RuntimeStatus
from launcher.client.staleness import check_integers, check_staleness
from launcher.client.trajectories.gather_context import GatherContext
from launcher.client.trajectories.gathering import AfterEach
from launcher.client.trajectories.in_flight_group import InFlightGroup
from launcher.client.trajectories.trajectory_group import TrajectoryGroup, close_unawaited

Pending = Awaitable[TrajectoryGroup] | TrajectoryGroup


class VersionedRun(Protocol):
    """The part of a run that is read here; a Session has it."""

    @property
    def version(self) -> int: ...
    @property
    def rewinds(self) -> int: ...
    def status(self) -> RuntimeStatus: ...


class StepGroups(list[TrajectoryGroup]):
    """A step's groups, the oldest first, and their data.

    `place`: to be kept in the step's `state`, and given to `gather_ahead` by a program that begins again.
    `numbers`: the numbers of the given groups that are in it. `again`: those of them without variance, for
    which others were rolled out. `stale`: those left out since the step before. `lags`: the number of its
    answers by their age in steps.
    """

    def __init__(
        self, taken: Sequence[InFlightGroup], stale: Iterable[InFlightGroup], cursor: Cursor[int], newest: int
    ) -> None:
        super().__init__(group for one in taken for group in one.groups)
        # Merged into a state it leaves nothing of an earlier one.
        self.place = {"steps": cursor.steps, "next": cursor.next, "again": [*cursor.again]}
        self.numbers = [one.key for one in taken]
        self.again = [one.key for one in taken if one.replaced]
        self.stale = sorted(one.key for one in stale)
        versions = sum((one.versions() for one in taken), Counter[int]())
        self.lags = {newest - version: count for version, count in sorted(versions.items(), reverse=True)}


async def gather_ahead(
    run: VersionedRun,
    groups: Iterable[Pending | Callable[[], Pending]],
    *,
    per_step: int,
    steps: int | None = None,
    staleness: int = 0,
    place: Mapping[str, Any] | None = None,
    dynamic_sampling: bool | int = False,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> AsyncGenerator[StepGroups, None]:
    """The groups of one step after the other, each as soon as `per_step` of them are there.

    `groups`: as many as you like, endless too, each one pending or a function that makes one; they are taken
    one by one as they are begun. While a step is trained (`train_async`) those of the next `staleness` steps
    go on. A late one goes into a later step. If it would be more than `staleness` steps old it is cancelled,
    counted and replaced by the next. `steps`: so many in all, including those before `place`; no group is
    begun that no step would have. `dynamic_sampling`: if all rewards of a group are equal, or `after_each`
    leaves it out, the next one is rolled out as well, up to so many rollouts more in a step (True: three
    times the step's own). The rest is as in `gather_trajectory_groups`, where `max_exceptions` counts the
    groups that are in no step yet.

    A program that was ended goes on with the `place` of its state, and the same groups from the first on.
    Raises Rewound if the machine was lost: the groups in progress are lost, and the place is that of
    `read_state()`.
    """
    check_integers(per_step=per_step, staleness=staleness)
    if per_step < 1 or staleness < 0:
        raise ValueError(f"per_step is at least 1 and staleness at least 0, not {per_step} and {staleness}")
    if staleness:
        status = await asyncio.to_thread(run.status)
        check_staleness(staleness, status.max_staleness)
    shown = GatherContext(max_exceptions, 0, pbar_desc, max_metrics)
    bounds = Bounds(per_step, staleness, steps)
    keys = _RunningNumbers(per_step, dynamic_sampling)
    ahead = _Ahead(run, bounds, keys, groups, _cursor_of(place), shown, after_each)
    try:
        while (taken := await ahead.take()) is not None:
            yield taken
    finally:
        await ahead.end()


@dataclass
class _RunningNumbers:
    """The given groups by their numbers. `extra`: the rollouts of the next step besides its own."""

    per_step: int
    dynamic_sampling: bool | int
    extra: int = 0

    def planned(self, number: int) -> int:
        return number

    def after(self, key: int) -> int:
        return key + 1

    def replacement(self, key: int, size: int, following: int) -> int | None:
        if self.extra + max(1, size) > max_extra_rollouts(self.dynamic_sampling, self.per_step * size):
            return None
        self.extra += size
        return following


class _Ahead:
    """Drives the scheduler with the given groups. Its user is one coroutine."""

    def __init__(
        self,
        run: VersionedRun,
        bounds: Bounds,
        keys: _RunningNumbers,
        groups: Iterable[Pending | Callable[[], Pending]],
        cursor: Cursor[int],
        shown: GatherContext,
        after_each: AfterEach | None,
    ) -> None:
        self._run = run
        self._rewinds = run.rewinds
        self._staleness = bounds.staleness
        self._keys = keys
        self._scheduler = RolloutScheduler(bounds, keys, self._begin, cursor)
        self._given = enumerate(groups)
        self._closes_unused = isinstance(groups, Sequence)
        self._shown = shown
        self._after_each = after_each
        # Groups begun that are in no step, those of them that were too old, and their finished trajectories.
        self._unused = Counter[str]()
        # Cancelled, and perhaps not at their end.
        self._ending: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        # The newest version that is known: it was served, or an answer has named it.
        self._seen = 0

    async def take(self) -> StepGroups | None:
        """The next step's groups, once they are there; None if there are no more.

        Raises the error of a rollout past the allowed number, and Rewound.
        """
        if self._run.rewinds != self._rewinds:
            raise _machine_lost("a step was refused: what was begun before is not known any more")
        if self._staleness:
            await self._read_version()
        while True:
            stale = self._scheduler.drop_stale(self._scheduler.open.values(), self._seen)
            self._unused["stale"] += len(stale)
            self._cancel(stale)
            self._scheduler.admit(self._scheduler.taken)
            if self._error is not None:
                raise self._error
            if self._scheduler.is_ready():
                return self._taken()
            if not self._scheduler.open:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """End all groups in progress; the groups that were begun and are in no step are logged."""
        self._cancel([*self._scheduler.open.values()])
        for _, given in self._given if self._closes_unused else ():
            close_unawaited(given)
        self._shown.close()
        if groups := self._unused["groups"]:
            came = _plural(self._unused["came"], "trajectory", "trajectories")
            stale = f" ({self._unused['stale']} as too old)" if self._unused["stale"] else ""
            _log(f"{_plural(groups, 'group')} begun and in no step{stale}: {came} had come")
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _begin(self, key: int) -> InFlightGroup | None:
        """Begin the group with this number, if it is given; those before it are in a step or left out."""
        for number, given in self._given:
            if number < key:
                close_unawaited(given)
                continue
            pending = given() if callable(given) else given
            since = self._seen if self._staleness else None
            begun = InFlightGroup(number, since, pending, self._after_each, self._shown)
            begun.task.add_done_callback(partial(self._one_ended, begun))
            return begun
        return None

    def _one_ended(self, begun: InFlightGroup, _: object) -> None:
        """Called as soon as one has ended. An error waits until the next step is taken."""
        if begun.task in self._ending:
            return
        try:
            self._seen = max(self._seen, *begun.versions(), 0)
            self._scheduler.ended(begun, begun.has_zero_variance(), begun.size)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised again where a step is taken
            self._error = self._error or error
        self._changed.set()

    async def _read_version(self) -> None:
        """Which version is served now. Raises Rewound if it is an older one than there was."""
        served = await asyncio.to_thread(lambda: self._run.version)
        if served < self._seen:
            raise _machine_lost(f"version {served} is served, and version {self._seen} was before")
        self._seen = served

    def _taken(self) -> StepGroups:
        taken, stale = self._scheduler.take()
        for begun in taken:
            begun.leave()
        self._keys.extra = 0
        self._shown.end_line()
        if stale:
            _log(
                f"step {self._scheduler.taken}: {_plural(len(stale), 'group')} left out as too old for "
                f"staleness={self._staleness}; others are rolled out instead"
            )
        return StepGroups(taken, stale, self._scheduler.cursor(), self._seen)

    def _cancel(self, left: list[InFlightGroup]) -> None:
        """Cancelled, and not waited for."""
        for begun in left:
            self._unused.update(groups=1, came=begun.came)
            begun.leave()
            if not begun.task.cancelling():  # by the loop's own end: once is enough
                begun.task.cancel()
            self._ending.add(begun.task)
            begun.task.add_done_callback(self._ending.discard)


def _cursor_of(place: Mapping[str, Any] | None) -> Cursor[int]:
    """Read a step's `place`; the beginning for None. Raises ValueError for anything else."""
    if not place:
        return Cursor()
    if not {"steps", "next", "again"} <= set(place):
        raise ValueError(f"a place is the `groups.place` of a step, and this has {sorted(place)}")
    return Cursor(place["steps"], place["next"], tuple(sorted(place["again"])))


def _machine_lost(why: str) -> Rewound:
    return Rewound("The machine was lost, and the run went back", 409, why=why)


def _plural(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _log(text: str) -> None:
    sys.stderr.write(f"slipway: {sanitized(text)}\n")
    sys.stderr.flush()
