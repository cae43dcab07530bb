"""Decides which rollout groups are begun, which of them make the next step, and which are too old for it.

Bounded staleness, as AReaL admits rollouts (arXiv 2505.24298): a group is begun when no more than `staleness`
steps are ahead of it. With `staleness` 0 exactly one step's groups are in progress, which is a barrier. A
step takes the oldest groups that have ended. Another one goes into a later step, or is dropped as stale if
it would be more than `staleness` steps old. A group without variance teaches nothing, so another one is
begun in its place (DAPO, arXiv 2503.14476). Neighbours: `dspy/rollout_pool.py` drives this with threads,
`trajectories/ahead.py` with asyncio. Knows nothing of either, of time, or of a group's content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", int, tuple[int, int])
"""A group's name. Of two groups that have ended, the one with the lower key goes into a step first."""

# Of a step's own rollouts, the default bound for extra ones.
_MAX_EXTRA_FACTOR = 3


@dataclass(frozen=True)
class Bounds:
    """The groups of a step, the age of a group in steps, and the number of steps (None: no end)."""

    per_step: int
    staleness: int
    steps: int | None = None

    def groups(self, done: int) -> int:
        """How many groups may be begun, in all, once `done` steps are done."""
        steps = done + 1 + self.staleness
        return self.per_step * (steps if self.steps is None else min(steps, self.steps))


@dataclass(frozen=True)
class Cursor(Generic[Key]):
    """The place from which a restarted program goes on: what is to be rolled out after `steps` steps.

    These are the groups `again`, then all planned ones from number `next` on. `extras`: by planned step, how
    many groups were begun besides its own, where these have keys of their own.
    """

    steps: int = 0
    next: int = 0
    again: tuple[Key, ...] = ()
    extras: Mapping[int, int] = field(default_factory=dict)


class ScheduledGroup(Protocol[Key]):
    """`has_ended` and `replaced` (without variance, and another was begun in its place) are set here."""

    key: Key
    has_ended: bool
    replaced: bool

    def oldest(self) -> int | None:
        """The oldest policy version that has answered in it; None if none has."""


GroupT = TypeVar("GroupT", bound=ScheduledGroup)


class KeyPlan(Protocol[Key]):
    """The keys of groups: the planned ones by their numbers, and the extra ones."""

    def planned(self, number: int) -> Key: ...
    def after(self, key: Key) -> int:
        """The number of the planned group after this one; 0 for an extra one."""
        ...

    def replacement(self, key: Key, size: int, following: Key) -> Key | None:
        """The group that is begun in place of one without variance; None where no more extra ones may be.

        `size`: its rollouts. `following`: the next one to begin otherwise.
        """


def max_extra_rollouts(dynamic_sampling: bool | int, rollouts: int) -> int:
    """The number of rollouts that a step may have besides its own: none by default, whatever the loss.

    `rollouts`: the step's own. A number given by the user is the bound itself.
    """
    if isinstance(dynamic_sampling, bool):
        return _MAX_EXTRA_FACTOR * rollouts if dynamic_sampling else 0
    return dynamic_sampling


class RolloutScheduler(Generic[Key, GroupT]):
    """`begin` begins a group and returns it, or None if there is no such group: no more are begun then.

    `open`: the groups that are begun and in no step. `stale`: those dropped since the last step. `taken`: the
    number of steps taken.
    """

    def __init__(
        self, bounds: Bounds, keys: KeyPlan[Key], begin: Callable[[Key], GroupT | None], cursor: Cursor[Key]
    ) -> None:
        self._bounds, self._keys, self._make = bounds, keys, begin
        self.taken = cursor.steps
        self.open: dict[Key, GroupT] = {}
        self.stale: list[GroupT] = []
        self._again = list(cursor.again)
        # Numbers of planned groups: the next to begin, and the one after the last that has left.
        self._next = self._after_left = cursor.next
        self._most = 0

    # ------------------------------------------------------------- beginning

    def admit(self, done: int) -> None:
        """Begin the groups that are allowed once `done` steps are done."""
        self._most = self._bounds.groups(done)
        self.fill()

    def fill(self) -> None:
        """Begin groups in all free places."""
        filled = self.taken * self._bounds.per_step + sum(not it.replaced for it in self.open.values())
        for _ in range(filled, self._most):
            if not self._begin(self._following()):
                return

    def ended(self, group: GroupT, zero_variance: bool, size: int) -> None:
        """A group has ended. Without variance it makes room for another, as far as extra ones are allowed."""
        group.has_ended = True
        if zero_variance:
            key = self._keys.replacement(group.key, size, self._following())
            group.replaced = key is not None and self._begin(key)

    def _following(self) -> Key:
        return self._again[0] if self._again else self._keys.planned(self._next)

    def _begin(self, key: Key) -> bool:
        group = self._make(key)
        if group is None:
            return False
        self.open[key] = group
        self._again = [it for it in self._again if it != key]
        self._next = max(self._next, self._keys.after(key))
        return True

    # ------------------------------------------------------------- taking out

    def drop_stale(self, groups: Iterable[GroupT], newest: int | None) -> list[GroupT]:
        """Drop and return those of the open `groups` that would be too old in the next step: they only
        become older.

        `newest`: the newest policy version, None if it is unknown. `fill` begins others in their places.
        """
        # At 0 nothing is trained while a rollout is in progress.
        if newest is None or not self._bounds.staleness:
            return []
        oldest = newest - self._bounds.staleness
        stale = [it for it in groups if (version := it.oldest()) is not None and version < oldest]
        self._leave(stale)
        self.stale += stale
        return stale

    def ended_groups(self) -> list[GroupT]:
        """The open groups that have ended, the oldest first."""
        return [it for _, it in sorted(self.open.items()) if it.has_ended]

    def is_ready(self) -> bool:
        """Whether the next step's groups are there: all that are left, where no more can be begun."""
        ended = self.ended_groups()
        is_full = sum(not it.replaced for it in ended) >= self._bounds.per_step
        return is_full or 0 < len(ended) == len(self.open)

    def take(self) -> tuple[list[GroupT], list[GroupT]]:
        """The groups of the next step, the oldest first, and those dropped since the step before.

        A step also has the groups without variance that others were begun in place of.
        """
        ended = self.ended_groups()
        full = [it for it in ended if not it.replaced][: self._bounds.per_step]
        step = sorted([*full, *(it for it in ended if it.replaced)], key=lambda it: it.key)
        self._leave(step)
        self.taken += 1
        stale, self.stale = self.stale, []
        return step, stale

    def cursor(self) -> Cursor[Key]:
        """The place after the steps taken. Groups after the last one that has left follow by themselves."""
        left = sorted({*self.open, *self._again})
        again = tuple(it for it in left if self._keys.after(it) <= self._after_left)
        return Cursor(self.taken, self._after_left, again)

    def _leave(self, groups: Iterable[GroupT]) -> None:
        for it in groups:
            del self.open[it.key]
            self._after_left = max(self._after_left, self._keys.after(it.key))
