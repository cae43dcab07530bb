"""Stragglers under staleness, in played time: a run in twelve takes half a minute, and no step waits for one.

The pool is the real one, over workers whose seconds are counted here and never waited for.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import dspy
import pytest

from launcher.client.dspy.grouping import Grouped
from launcher.client.dspy.outstanding import Key
from launcher.client.dspy.pool import Bounds, Pool, Taken
from launcher.client.dspy.rollouts import Finished, Run
from launcher.client.dspy.tagging import Answered, Predictors, Rollout
from launcher.client.dspy.tickets import Ended, Ticket
from launcher.client.dspy.workers import Job, Workers

E, K, STEPS = 4, 3, 40
PREDICTOR = "self"
# A run, one in twelve, and a step's training.
RUN_SECONDS, STRAGGLER_SECONDS, TRAINING_SECONDS = 1.0, 30.0, 2.0


class Played(Workers[Finished]):
    """Every job is under way at once, and its seconds pass when somebody waits."""

    def __init__(self, seconds_of: Callable[[Job[Finished]], float]) -> None:
        super().__init__(1, 1.0)
        self.now = 0.0
        self._seconds_of = seconds_of
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Job[Finished]]] = []

    def add(self, jobs: Sequence[Job[Finished]]) -> None:
        for job in jobs:
            job.began = self.now
            heapq.heappush(self._ends, (self.now + self._seconds_of(job), next(self._order), job))

    def until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._next()

    def pass_seconds(self, seconds: float) -> None:
        until = self.now + seconds
        while self._ends and self._ends[0][0] <= until:
            self._next()
        self.now = until

    def let_go(self, jobs: Collection[Job[Finished]]) -> None:
        self._ends = [it for it in self._ends if it[2] not in jobs]
        heapq.heapify(self._ends)

    def _next(self) -> None:
        self.now, _, job = heapq.heappop(self._ends)
        job.result, job.has_ended = job.do(), True
        job.ended()


@dataclass
class Trained:
    """A whole training. `left`: when each step left; `ages`: of its answers, how old; `stale`: left out."""

    staleness: int
    straggles: Callable[[], bool]
    left: list[float] = field(default_factory=list)
    ages: list[Counter[int]] = field(default_factory=list)
    taken: list[Key] = field(default_factory=list)
    stale: list[Key] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self._slow: dict[int, bool] = {}
        self.workers = Played(lambda job: STRAGGLER_SECONDS if self._slow[id(job)] else RUN_SECONDS)
        self.pool = Pool(Bounds(STEPS, E, 0, self.staleness), self.workers, self._ticket, 0)
        for done in range(STEPS):  # as `training.py` has it
            self.pool.go_on(done)
            self._note(self.pool.take(done, self.version or None))
            self.workers.pass_seconds(TRAINING_SECONDS)
            self.version = done + 1

    def _note(self, taken: Taken) -> None:
        self.left.append(self.workers.now)
        self.taken += [it.key for it in taken.tickets]
        self.stale += [it.key for it in taken.stale]
        answered = [it.run.rollout.versions_of({PREDICTOR}) for it in _finished(taken.tickets)]
        self.ages.append(Counter(self.version - version for it in answered for version in it))

    def _ticket(self, key: Key) -> Ticket:
        runs = [Run(dspy.Example(), key[1], Rollout(f"{key}-{member}", Predictors())) for member in range(K)]
        jobs = [Job(self._answering(run, self.version), key) for run in runs]
        self._slow |= {id(job): self.straggles() for job in jobs}
        ticket = Ticket(key, runs, jobs, lambda: _judged(ticket), frozenset({PREDICTOR}))
        return ticket

    def _answering(self, run: Run, version: int) -> Callable[[], Finished]:
        """What was served when the run began answers it, however long that takes."""

        def do() -> Finished:
            run.rollout.note_answer(run.rollout.next_call(PREDICTOR), Answered(version))
            return Finished(run, "scored")

        return do


def _finished(tickets: Sequence[Ticket]) -> list[Finished]:
    return [it for ticket in tickets if ticket.ended for it in ticket.ended.finished]


def _judged(ticket: Ticket) -> Ended:
    finished = [job.result for job in ticket.jobs if isinstance(job.result, Finished)]
    return Ended(finished, Grouped(), False, ticket.oldest())


def never() -> bool:
    return False


def one_in_twelve(seed: int) -> Callable[[], bool]:
    drawn = random.Random(seed)
    return lambda: drawn.randrange(12) == 0


if __name__ == "__main__":
    base = Trained(2, never)
    print(base.left[:6], base.left[-1])
    for s in (0, 1, 2):
        for seed in range(4):
            t = Trained(s, one_in_twelve(seed))
            waits = [b - a - 2 for a, b in zip(t.left, t.left[1:])]
            print(s, seed, t.left[-1], max(waits), [round(w,1) for w in waits], len(t.stale), max(map(max, t.ages)))
