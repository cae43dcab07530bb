"""Steps of groups, rolled out while others are trained: as many in progress as allowed, none too old.

    async for groups in gather_ahead(run, scenarios, per_step=8, steps=100, staleness=1):
        await run.train_async(groups, state={"place": groups.place})

As `GRPO(staleness=N)` does: a group is begun when no more than `staleness` steps are ahead of it, so that
with 0 exactly one step's are in progress: gather, train, gather. Neighbours: `begun_group.py` is a group in
progress, `gathering.py` is the barrier. Knows nothing of a rollout's making or a step's training.
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
from launcher.client.schema import RuntimeStatus
from launcher.client.staleness import check_integers, check_staleness
from launcher.client.trajectories.ahead_place import Place
from launcher.client.trajectories.begun_group import BegunGroup
from launcher.client.trajectories.gather_context import GatherContext
from launcher.client.trajectories.gathering import AfterEach
from launcher.client.trajectories.trajectory_group import TrajectoryGroup, close_unawaited

Pending = Awaitable[TrajectoryGroup] | TrajectoryGroup
# Of a step's own groups, the default bound for extra rollouts.
_MAX_EXTRA_FACTOR = 3


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

    def __init__(self, begun: Iterable[BegunGroup], stale: Iterable[int], place: Place, newest: int) -> None:
        taken = list(begun)
        super().__init__(group for one in taken for group in one.groups)
        self.place = place.to_dict()
        self.numbers = [one.number for one in taken]
        self.again = [one.number for one in taken if one.replaced]
        self.stale = sorted(stale)
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
    bounds = _Bounds(per_step, steps, staleness, dynamic_sampling)
    ahead = _Ahead(run, bounds, groups, Place.of(place), shown, after_each)
    try:
        while (taken := await ahead.take()) is not None:
            yield taken
    finally:
        await ahead.end()


@dataclass(frozen=True)
class _Bounds:
    per_step: int
    steps: int | None
    staleness: int
    dynamic_sampling: bool | int

    def places(self, done: int) -> int:
        """The number of groups that may be in progress after `done` steps."""
        most = done + 1 + self.staleness
        return (most if self.steps is None else min(most, self.steps)) * self.per_step - done * self.per_step

    def allows(self, extra: int, size: int) -> bool:
        """Whether a step that has so many extra rollouts may have a group of `size` more."""
        most = self.dynamic_sampling
        if isinstance(most, bool):
            most = _MAX_EXTRA_FACTOR * self.per_step * size if most else 0
        return extra + max(1, size) <= most


class _Ahead:
    """The groups that are begun and in no step. Its user is one coroutine."""

    def __init__(
        self,
        run: VersionedRun,
        bounds: _Bounds,
        groups: Iterable[Pending | Callable[[], Pending]],
        place: Place,
        shown: GatherContext,
        after_each: AfterEach | None,
    ) -> None:
        self._run = run
        self._rewinds = run.rewinds
        self._bounds = bounds
        self._given = enumerate(groups)
        self._closes_unused = isinstance(groups, Sequence)
        self._before, self._done, self._next = place, place.steps, place.next
        self._shown = shown
        self._after_each = after_each
        self._open: dict[int, BegunGroup] = {}
        self._stale: list[int] = []
        # Groups begun that are in no step, those of them that were too old, and their finished trajectories.
        self._unused = Counter[str]()
        # The last of the given groups that was looked at.
        self._last = -1
        # Cancelled, and perhaps not at their end.
        self._ending: set[asyncio.Task[Any]] = set()
        self._extra = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        # Versions: the served one, and the newest that any step or answer has named.
        self._newest: int | None = None
        self._seen = 0

    async def take(self) -> StepGroups | None:
        """The next step's groups, once they are there; None if there are no more.

        Raises the error of a rollout past the allowed number, and Rewound.
        """
        if self._run.rewinds != self._rewinds:
            raise _machine_lost("a step was refused: what was begun before is not known any more")
        if self._bounds.staleness:
            await self._read_version()
        while True:
            self._drop_stale()
            while self._filled() < self._bounds.places(self._done) and self._begin():
                pass
            if self._error is not None:
                raise self._error
            ended = [it for _, it in sorted(self._open.items()) if it.has_ended]
            own = [it for it in ended if not it.replaced][: self._bounds.per_step]
            if len(own) == self._bounds.per_step or (ended and len(ended) == len(self._open)):
                return self._taken(own + [it for it in ended if it.replaced])
            if not self._open:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """End all groups in progress; the groups that were begun and are in no step are logged."""
        self._cancel([*self._open.values()])
        for _, given in self._given if self._closes_unused else ():
            close_unawaited(given)
        self._shown.close()
        if groups := self._unused["groups"]:
            came = _plural(self._unused["came"], "trajectory", "trajectories")
            stale = f" ({self._unused['stale']} as too old)" if self._unused["stale"] else ""
            _log(f"{_plural(groups, 'group')} begun and in no step{stale}: {came} had come")
        await asyncio.gather(*self._ending, return_exceptions=True)

    # ------------------------------------------------------------- beginning

    def _begin(self) -> bool:
        """Begin the next group that is given, if there is one."""
        for number, given in self._given:
            self._last = number
            if not self._before.has(number):
                close_unawaited(given)
                continue
            pending = given() if callable(given) else given
            since = None if self._newest is None else self._seen
            begun = BegunGroup(number, since, pending, self._after_each, self._shown)
            self._open[number] = begun
            begun.task.add_done_callback(partial(self._one_ended, begun))
            return True
        return False

    def _filled(self) -> int:
        """How many of the places are."""
        return sum(not it.replaced for it in self._open.values())

    def _one_ended(self, begun: BegunGroup, _: object) -> None:
        """Called as soon as one has ended. An error waits until the next step is taken."""
        if self._open.get(begun.number) is not begun:
            return
        try:
            self._seen = max(self._seen, *begun.versions(), 0)
            begun.has_ended = True
            if begun.has_zero_variance() and self._bounds.allows(self._extra, begun.size):
                begun.replaced = self._begin()
                self._extra += begun.size * begun.replaced
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised again where a step is taken
            self._error = self._error or error
        self._changed.set()

    # ------------------------------------------------------------- taking out

    async def _read_version(self) -> None:
        """Which version is served now. Raises Rewound if it is an older one than there was."""
        self._newest = await asyncio.to_thread(lambda: self._run.version)
        if self._newest < self._seen:
            raise _machine_lost(f"version {self._newest} is served, and version {self._seen} was before")
        self._seen = self._newest

    def _drop_stale(self) -> None:
        """Drop groups that would be too old in the next step, done or not: they only become older."""
        stale = [it for it in self._open.values() if self._is_stale(it)]
        self._cancel(stale)
        self._stale += [it.number for it in stale]
        self._unused["stale"] += len(stale)

    def _is_stale(self, begun: BegunGroup) -> bool:
        # At 0 nothing is trained while a rollout is in progress.
        if not self._bounds.staleness or self._newest is None:
            return False
        oldest = begun.oldest()
        # Where a step is trained meanwhile, an answer may tell of a newer version than was looked up.
        return oldest is not None and self._seen - oldest > self._bounds.staleness

    def _taken(self, taken: list[BegunGroup]) -> StepGroups:
        taken.sort(key=lambda it: it.number)
        for begun in taken:
            self._close(begun)
        self._done += 1
        self._extra = 0
        self._shown.end_line()
        stale, self._stale = self._stale, []
        if stale:
            _log(
                f"step {self._done}: {_plural(len(stale), 'group')} left out as too old for "
                f"staleness={self._bounds.staleness}; others are rolled out instead"
            )
        return StepGroups(taken, stale, self._place(), self._seen)

    def _place(self) -> Place:
        left = {*self._open, *(it for it in self._before.again if it > self._last)}
        return Place(self._done, self._next, frozenset(it for it in left if it < self._next))

    def _cancel(self, left: list[BegunGroup]) -> None:
        """Cancelled, and not waited for."""
        for begun in left:
            self._unused.update(groups=1, came=begun.came)
            self._close(begun)
            if not begun.task.cancelling():  # by the loop's own end: once is enough
                begun.task.cancel()
            self._ending.add(begun.task)
            begun.task.add_done_callback(self._ending.discard)

    def _close(self, begun: BegunGroup) -> None:
        del self._open[begun.number]
        begun.leave()
        self._next = max(self._next, begun.number + 1)


def _machine_lost(why: str) -> Rewound:
    return Rewound("The machine was lost, and the run went back", 409, why=why)


def _plural(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _log(text: str) -> None:
    sys.stderr.write(f"slipway: {sanitized(text)}\n")
    sys.stderr.flush()
