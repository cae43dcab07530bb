"""The rollouts in progress, across the bounds of steps: always as many as allowed, none older than allowed.

A ticket is begun when no more than `staleness` steps are ahead of it, as AReaL admits rollouts (arXiv
2505.24298): with `staleness` 0 exactly one step's are in progress, which is a barrier. A step takes the
oldest tickets that are done. One that is not done goes into a later step, or is left out as "stale" if it
would be older than `staleness` steps. Neighbours: `rolling.py` makes tickets, `workers.py` do the runs,
`training.py` takes steps out. Knows nothing of examples, rewards or the wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from launcher.client.dspy.outstanding import Key, Outstanding
from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.dspy.tickets import Ticket
from launcher.client.dspy.workers import BackgroundCall, Workers, WorkerTask

_Awaited = TypeVar("_Awaited")


@dataclass(frozen=True)
class PoolBounds:
    """A training's steps, the examples of each, the extra ones for zero-variance ones, and the age."""

    steps: int
    per_step: int
    most_extra: int
    staleness: int


@dataclass(frozen=True)
class StepTickets:
    """The tickets of one step, the oldest first, and those that were left out since the step before.

    `outstanding`: the tickets to roll out that do not follow from the number of steps; None if there are
    none.
    """

    tickets: list[Ticket]
    stale: list[Ticket]
    outstanding: Outstanding | None


class RolloutPool:
    """`make` makes a ticket by its key. `done`: the steps that are done. Its user is one thread.

    Only `begin_allowed` may be called from others.
    """

    def __init__(
        self,
        bounds: PoolBounds,
        workers: Workers[FinishedRun],
        make: Callable[[Key], Ticket],
        done: int,
        begin: Outstanding | None = None,
    ) -> None:
        self.workers = workers
        self._bounds = bounds
        self._make = make
        begin = begin or Outstanding(done * bounds.per_step)
        self._again = list(begin.tickets)
        self._next = self._after_taken = begin.next
        self._extras = Counter(dict(begin.extras))
        self._open: dict[Key, Ticket] = {}
        self._stale: list[Ticket] = []
        # Places of the steps so far that are filled or being filled, and how many there may be.
        self._places = done * bounds.per_step
        self._most_places = 0

    def begin_allowed(self, done: int) -> None:
        """Begin the tickets that are allowed once `done` steps are done."""
        with self.workers.changed:
            ahead = min(done + 1 + self._bounds.staleness, self._bounds.steps)
            self._most_places = ahead * self._bounds.per_step
            self._fill()

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
    ) -> StepTickets:
        """The tickets of the next step, once there are enough. Raises the errors of runs and of `left_out`.

        `newest`: the version that the step is trained on; None if nothing was trained that could make one
        older. `is_served`: whether it answers already; otherwise the tickets after it wait for a
        `begin_allowed`. `left_out` is called when tickets were left out and too few others are there: if the
        newest version is not served any more, every new ticket would be left out, for ever.
        """
        if is_served:
            self.begin_allowed(done)
        told = 0
        while True:
            with self.workers.changed:
                self._drop_stale(list(self._open.values()), newest)
                self.workers.wait_until(partial(self._is_enough_or_stale, newest, told))
                if self._is_enough(newest):
                    return self._taken(done)
                told = len(self._stale)
            left_out()

    def _taken(self, done: int) -> StepTickets:
        filling = [it for it in self._ended() if not it.replaced][: self._bounds.per_step]
        tickets = sorted([*filling, *(it for it in self._ended() if it.replaced)], key=lambda it: it.key)
        self._close(tickets)
        stale, self._stale = self._stale, []
        return StepTickets(tickets, stale, self._outstanding(done + 1))

    def end(self) -> list[Ticket]:
        """No run is in progress from here on: the tickets that were begun, and are in no step."""
        with self.workers.changed:
            self.workers.stop()
            left = [*self._open.values(), *self._stale]
            self._abandon(left)
            return left

    # ------------------------------------------------------------- beginning

    def _fill(self) -> None:
        while self._places < self._most_places:
            self._places += 1
            self._begin(self._again.pop(0) if self._again else self._own())

    def _own(self) -> Key:
        number, self._next = self._next, self._next + 1
        return divmod(number, self._bounds.per_step)

    def _begin(self, key: Key) -> None:
        ticket = self._open[key] = self._make(key)
        left = set(ticket.jobs)
        for job in ticket.jobs:
            job.on_done = partial(self._one_ended, ticket, left, job)
        self.workers.add(ticket.jobs)

    def _one_ended(
        self, ticket: Ticket, left: set[WorkerTask[FinishedRun]], job: WorkerTask[FinishedRun]
    ) -> None:
        """Told by the workers while nothing else changes. A flat ticket makes room for another example."""
        left.discard(job)
        if left or ticket.key not in self._open:
            return
        ticket.ended = ticket.judge()
        step = ticket.key[0]
        if ticket.ended.zero_variance and self._extras[step] < self._bounds.most_extra:
            ticket.replaced = True
            self._extras[step] += 1
            self._begin((step, self._bounds.per_step + self._extras[step] - 1))

    # ------------------------------------------------------------- taking out

    def _is_enough(self, newest: int | None) -> bool:
        self._drop_stale(self._ended(), newest)
        return sum(not it.replaced for it in self._ended()) >= self._bounds.per_step

    def _is_enough_or_stale(self, newest: int | None, told: int) -> bool:
        return self._is_enough(newest) or len(self._stale) > told

    def _ended(self) -> list[Ticket]:
        """The tickets that are done, the oldest first."""
        return [self._open[key] for key in sorted(self._open) if self._open[key].ended is not None]

    def _drop_stale(self, tickets: Iterable[Ticket], newest: int | None) -> None:
        """Drop tickets that would be too old in the next step, done or not: they only become older."""
        stale = [it for it in tickets if self._is_stale(it, newest)]
        if not stale:
            return
        self._abandon(stale)
        self._close(stale)
        self._stale += stale
        self._places -= sum(not it.replaced for it in stale)
        self._fill()

    def _is_stale(self, ticket: Ticket, newest: int | None) -> bool:
        # At 0 nothing is trained while a rollout is in progress.
        if newest is None or not self._bounds.staleness:
            return False
        oldest = ticket.oldest()
        return oldest is not None and newest - oldest > self._bounds.staleness

    def _abandon(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.end()
        self.workers.abandon([job for ticket in tickets for job in ticket.jobs])

    def _close(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            del self._open[ticket.key]
            if ticket.key[1] < self._bounds.per_step:
                self._after_taken = max(self._after_taken, self._number(ticket.key) + 1)

    def _number(self, key: Key) -> int:
        return key[0] * self._bounds.per_step + key[1]

    def _outstanding(self, done: int) -> Outstanding | None:
        """The tickets in progress that come before the last one taken; later ones follow from the number of
        steps."""
        per_step = self._bounds.per_step
        keys = sorted({*self._open, *self._again})
        before = tuple(it for it in keys if it[1] >= per_step or self._number(it) < self._after_taken)
        live = {step for step, _ in before}
        extras = {
            step: count
            for step, count in sorted(self._extras.items())
            if step in live or step >= self._after_taken // per_step
        }
        found = Outstanding(self._after_taken, before, extras)
        return None if found == Outstanding(done * per_step) else found
