"""Stragglers under staleness, in played time: a run in forty takes half a minute, no step waits for one.

The pool is the real one, over workers whose seconds are counted here and never waited for.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import dspy
import pytest

from launcher.client.dspy.grouping import GroupingResult
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import AnswerRecord, ProgramRollout
from launcher.client.dspy.rollout_group import Ended, RolloutGroup
from launcher.client.dspy.rollout_pool import ReadyGroups, RolloutPool
from launcher.client.dspy.rollouts import FinishedRun, ProgramRun
from launcher.client.dspy.step_keys import Key
from launcher.client.dspy.workers import Workers, WorkerTask
from launcher.client.scheduler import Bounds, Cursor

E, K, STEPS = 4, 3, 40
PREDICTOR = "self"
# A run, one in forty of them, and a step's training.
RUN_SECONDS, STRAGGLER_SECONDS, TRAINING_SECONDS = 1.0, 30.0, 2.0


class Played(Workers[FinishedRun]):
    """Every job is under way at once, and its seconds pass when somebody waits."""

    def __init__(self, seconds_of: Callable[[WorkerTask[FinishedRun]], float]) -> None:
        super().__init__(1, 1.0)
        self.now = 0.0
        self._seconds_of = seconds_of
        self._order = itertools.count()
        self._ends: list[tuple[float, int, WorkerTask[FinishedRun]]] = []

    def add(self, jobs: Sequence[WorkerTask[FinishedRun]]) -> None:
        for job in jobs:
            job.started_at = self.now
            heapq.heappush(self._ends, (self.now + self._seconds_of(job), next(self._order), job))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._next()

    def pass_seconds(self, seconds: float) -> None:
        until = self.now + seconds
        while self._ends and self._ends[0][0] <= until:
            self._next()
        self.now = until

    def abandon(self, jobs: Collection[WorkerTask[FinishedRun]]) -> None:
        self._ends = [it for it in self._ends if it[2] not in jobs]
        heapq.heapify(self._ends)

    def _next(self) -> None:
        self.now, _, job = heapq.heappop(self._ends)
        job.result, job.is_done = job.run(), True
        job.on_done()


@dataclass
class Trained:
    """A whole training. `left`: when each step left; `ages`: of its answers, how old; `stale`: left out."""

    staleness: int
    straggles: Callable[[], bool]
    left: list[float] = field(default_factory=list)
    ages: list[Counter[int]] = field(default_factory=list)
    taken: list[Key] = field(default_factory=list)
    stale: list[Key] = field(default_factory=list)
    per_example: int = K
    version: int = 0
    # By example, which of its runs are late.
    slow: dict[Key, list[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers = Played(self._seconds_of)
        bounds = Bounds(E, self.staleness, STEPS)
        self.pool = RolloutPool(bounds, 0, self.workers, self._make_group, Cursor())
        for done in range(STEPS):  # as `training.py` has it
            self.pool.begin_allowed(done)
            self._note(self.pool.take(done, self.version or None))
            self.workers.pass_seconds(TRAINING_SECONDS)
            self.version = done + 1

    def _note(self, taken: ReadyGroups) -> None:
        self.left.append(self.workers.now)
        self.taken += [it.key for it in taken.groups]
        self.stale += [it.key for it in taken.stale]
        answered = [it.run.rollout.versions_of({PREDICTOR}) for it in _finished(taken.groups)]
        self.ages.append(Counter(self.version - version for it in answered for version in it))

    def _seconds_of(self, job: WorkerTask[FinishedRun]) -> float:
        step, index, member = job.order
        return STRAGGLER_SECONDS if self.slow[step, index][member] else RUN_SECONDS

    def _make_group(self, key: Key) -> RolloutGroup:
        rollouts = [ProgramRollout(f"{key}-{member}", Predictors()) for member in range(self.per_example)]
        runs = [ProgramRun(dspy.Example(), key[1], it) for it in rollouts]
        jobs = [
            WorkerTask(self._answering(run, self.version), (*key, member)) for member, run in enumerate(runs)
        ]
        self.slow[key] = [self.straggles() for _ in runs]
        group = RolloutGroup(key, runs, jobs, lambda: _judged(group), frozenset({PREDICTOR}))
        return group

    def _answering(self, run: ProgramRun, version: int) -> Callable[[], FinishedRun]:
        """What was served when the run began answers it, however long that takes."""

        def do() -> FinishedRun:
            run.rollout.note_answer(run.rollout.next_call(PREDICTOR), AnswerRecord(version))
            return FinishedRun(run, "scored")

        return do


def _finished(groups: Sequence[RolloutGroup]) -> list[FinishedRun]:
    return [it for group in groups if group.ended for it in group.ended.finished]


def _judged(group: RolloutGroup) -> Ended:
    finished = [job.result for job in group.jobs if isinstance(job.result, FinishedRun)]
    return Ended(finished, GroupingResult(), False, group.oldest())


def never() -> bool:
    return False


def one_in(many: int, seed: int) -> Callable[[], bool]:
    drawn = random.Random(seed)
    return lambda: drawn.randrange(many) == 0


def waits(trained: Trained) -> list[float]:
    """How long each step waited for its rollouts, after the one before it was trained."""
    return [after - before - TRAINING_SECONDS for before, after in pairwise(trained.left)]


@pytest.mark.parametrize("seed", range(8))
def test_c39_stragglers_of_half_a_minute_hold_no_step_up_and_nothing_is_older_than_staleness(
    seed: int,
) -> None:
    """But for the last step: there is no later one that who is late could go into."""
    trained = Trained(2, one_in(40, seed))
    assert max(waits(trained)[:-1]) <= RUN_SECONDS
    assert max(max(it) for it in trained.ages) == 2
    assert sum(it.total() for it in trained.ages) == STEPS * E * K
    assert len(set(trained.taken)) == STEPS * E
    late = {key for key in trained.slow if not set(trained.slow[key]) <= {False}}
    assert set(trained.stale) <= late, "who is left out has a straggler"
    assert late - set(trained.taken) == set(trained.stale) | set(trained.pool._scheduler.open)
    without = Trained(2, never)
    assert set(waits(without)) == {0.0}
    assert trained.left[-2] <= without.left[-2] + 0.25 * STEPS * RUN_SECONDS


def test_the_same_stragglers_are_waited_for_at_staleness_0() -> None:
    waited = [max(waits(Trained(0, one_in(40, seed)))) for seed in range(8)]
    assert set(waited) == {STRAGGLER_SECONDS}


def test_more_stragglers_at_once_than_places_ahead_are_waited_for() -> None:
    """Ahead of a step are `staleness` steps' examples: so many may be late at once, and not one more."""
    for late, waited in ((2 * E, 0.0), (2 * E + 1, STRAGGLER_SECONDS - RUN_SECONDS)):
        first = iter([True] * late)
        trained = Trained(2, lambda first=first: next(first, False), per_example=1)
        assert trained.left[0] == RUN_SECONDS + waited
