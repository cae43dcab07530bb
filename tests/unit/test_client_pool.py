"""The pool by itself, with jobs that end when a test says so: what begins, what leaves, what is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dspy
import pytest

from launcher.client.dspy.grouping import GroupingResult
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import AnswerRecord, ProgramRollout
from launcher.client.dspy.rollout_group import Ended, RolloutGroup
from launcher.client.dspy.rollout_pool import ReadyGroups, RolloutPool
from launcher.client.dspy.rollouts import FinishedRun, ProgramRun
from launcher.client.dspy.step_keys import Key, cursor_of, cursor_state
from launcher.client.dspy.workers import BackgroundCall, Workers, WorkerTask
from launcher.client.scheduler import Bounds, Cursor

E, K = 2, 2
PREDICTOR = "self"
# For what a test waits for that fails.
PATIENCE = 15


class Watched(RolloutGroup):
    """Knows that its programs were told to end."""

    left_out = False

    def end(self) -> None:
        super().end()
        self.left_out = True


@dataclass
class Played:
    """A pool whose groups have `K` runs each, which end by `finish`."""

    pool: RolloutPool = field(init=False)
    begun: list[Key] = field(default_factory=list)
    groups: dict[Key, Watched] = field(default_factory=dict)
    ends: dict[Key, list[Future[None]]] = field(default_factory=dict)
    flat: set[Key] = field(default_factory=set)

    def group(self, key: Key) -> RolloutGroup:
        self.begun.append(key)
        rollouts = [ProgramRollout(f"{key}-{member}", Predictors()) for member in range(K)]
        runs = [ProgramRun(dspy.Example(), key[1], it) for it in rollouts]
        self.ends[key] = ends = [Future[None]() for _ in runs]
        jobs = [WorkerTask(partial(_ended, run, end), key) for run, end in zip(runs, ends, strict=True)]
        self.groups[key] = Watched(key, runs, jobs, partial(self._judged, key), frozenset({PREDICTOR}))
        return self.groups[key]

    def _judged(self, key: Key) -> Ended:
        group = self.groups[key]
        finished = [job.result for job in group.jobs if isinstance(job.result, FinishedRun)]
        return Ended(finished, GroupingResult(), key in self.flat, group.oldest())

    def answer(self, *keys: Key, version: int) -> None:
        """The runs of these have asked, and this version has answered."""
        for run in (run for key in keys for run in self.groups[key].runs):
            run.rollout.note_answer(run.rollout.next_call(PREDICTOR), AnswerRecord(version))

    def finish(self, *keys: Key, version: int | None = None) -> None:
        """These end, one after the other."""
        for key in keys:
            if version is not None:
                self.answer(key, version=version)
            for end in self.ends[key]:
                end.set_result(None)
            # A step waited for beside this may have left it out as soon as it had its answer.
            group = self.groups[key]
            self.pool.workers.wait_until(
                lambda: group.ended is not None or group.left_out  # noqa: B023 - waited for
            )

    def taking(self, done: int, newest: int) -> Future[ReadyGroups]:
        """What leaves, waited for by a thread of its own."""
        taken: Future[ReadyGroups] = Future()
        threading.Thread(target=lambda: taken.set_result(self.pool.take(done, newest)), daemon=True).start()
        return taken

    def waits(self) -> threading.Semaphore:
        """Released by whoever begins to wait for a change, who holds the lock until it does wait."""
        begun = threading.Semaphore(0)
        until = self.pool.workers.wait_until

        def told(is_done: Callable[[], bool]) -> None:
            begun.release()
            until(is_done)

        self.pool.workers.wait_until = told
        return begun

    def take(self, done: int, newest: int | None = None) -> list[Key]:
        return keys_of(self.pool.take(done, newest))


def _ended(run: ProgramRun, end: Future[None]) -> FinishedRun:
    end.result(PATIENCE)
    return FinishedRun(run, "scored")


def keys_of(taken: ReadyGroups) -> list[Key]:
    return [it.key for it in taken.groups]


@pytest.fixture
def make() -> Iterator[Any]:
    """`make(staleness=…)`: a pool of four steps with two examples each; its jobs are let go at the end."""
    made: list[Played] = []

    def of(
        done: int = 0,
        begin: Cursor[Key] | None = None,
        at_once: int = 64,
        most_extra: int = 0,
        staleness: int = 0,
        steps: int = 4,
    ) -> Played:
        played = Played()
        bounds = Bounds(E, staleness, steps)
        workers = Workers[FinishedRun](at_once, 4 * PATIENCE)
        cursor = begin or Cursor(done, done * E)
        played.pool = RolloutPool(bounds, most_extra, workers, played.group, cursor)
        made.append(played)
        return played

    yield of
    for played in made:
        played.pool.end()
        for end in (end for ends in played.ends.values() for end in ends):
            if not end.done():
                end.set_result(None)


def step(index: int) -> list[Key]:
    return [(index, place) for place in range(E)]


def test_c59_at_staleness_0_a_step_is_begun_when_the_one_before_it_is_done(make: Any) -> None:
    played = make()
    assert played.begun == []
    played.pool.begin_allowed(0)
    assert played.begun == step(0)
    played.finish(*step(0))
    assert played.take(0) == step(0)
    assert played.begun == step(0), "the step that left is not trained yet"
    played.pool.begin_allowed(1)
    assert played.begun == step(0) + step(1)


def test_c39_no_more_steps_are_begun_than_staleness_allows_and_than_there_are(make: Any) -> None:
    played = make(staleness=2)
    played.pool.begin_allowed(0)
    assert played.begun == step(0) + step(1) + step(2)
    played.finish(*step(0))
    played.take(0)
    assert len(played.begun) == 3 * E
    played.pool.begin_allowed(1)
    played.pool.begin_allowed(1)
    assert played.begun[3 * E :] == step(3)
    played.pool.begin_allowed(2)
    assert len(played.begun) == 4 * E, "the training has four steps"


def test_a_step_leaves_with_the_first_that_are_done_and_the_oldest_of_these(make: Any) -> None:
    played = make(staleness=2)
    played.pool.begin_allowed(0)
    played.finish((2, 1), (1, 1), (0, 0), (2, 0))
    assert played.take(0) == [(0, 0), (1, 1)]
    played.finish((0, 1))
    assert played.take(1) == [(0, 1), (2, 0)], "who was late is in a later step"


def test_c39_what_would_be_too_old_is_left_out_by_name_whether_it_is_done_or_not(make: Any) -> None:
    played = make(staleness=1, steps=6)
    played.pool.begin_allowed(0)
    played.answer((0, 1), version=0)  # and goes on
    played.finish((0, 0), (1, 0), (1, 1), version=0)
    assert played.take(0, newest=None) == [(0, 0), (1, 0)]
    played.pool.begin_allowed(1)
    played.finish((2, 0), version=1)
    assert played.take(1, newest=1) == [(1, 1), (2, 0)], "of version 0, as one step ago"
    played.pool.begin_allowed(2)
    assert (4, 0) not in played.begun
    played.finish((2, 1), version=1)
    played.finish((3, 0), version=2)
    taken = played.pool.take(2, 2)
    assert keys_of(taken) == [(2, 1), (3, 0)]
    assert [it.key for it in taken.stale] == [(0, 1)]
    assert (4, 0) in played.begun, "another one in its place"
    (run, _) = played.groups[0, 1].runs
    with pytest.raises(BaseException, match="this rollout is over"):
        run.rollout.next_call(PREDICTOR)


def test_c39_one_that_is_done_too_late_is_left_out_while_its_step_waits(make: Any) -> None:
    played = make(staleness=1, done=2)
    played.pool.begin_allowed(2)
    played.answer((3, 1), version=3)
    waits = played.waits()
    taken = played.taking(2, newest=5)
    for _ in range(2):  # at once, as it has left one out; then for what ends next
        assert waits.acquire(timeout=PATIENCE)
    assert (4, 0) in played.begun
    played.finish((2, 0), version=3)
    played.finish((2, 1), (3, 0), version=4)
    assert keys_of(taken.result(PATIENCE)) == [(2, 1), (3, 0)]
    assert [it.key for it in taken.result().stale] == [(3, 1), (2, 0)]


@pytest.mark.process
def test_a_straggler_gives_up_its_place_to_other_runs_once_it_is_left_out(make: Any) -> None:
    played = make(staleness=1, at_once=2 * K)
    played.pool.begin_allowed(0)
    played.answer((0, 0), version=0)  # and hangs, with half of the places
    played.finish((0, 1), (1, 0), (1, 1), version=0)
    played.take(0, newest=None)
    played.pool.begin_allowed(2)
    taken = played.taking(2, newest=2)
    played.pool.workers.wait_until(lambda: played.groups[2, 1].begun == K)
    played.finish((2, 0), (2, 1), version=2)
    assert [it.key for it in taken.result(PATIENCE).stale] == [(0, 0), (1, 1)]


def test_a22_a_flat_one_makes_room_for_another_of_the_step_it_was_planned_for(make: Any) -> None:
    played = make(staleness=1, most_extra=2)
    played.flat |= {(0, 0), (1, 0), (0, 2)}
    played.pool.begin_allowed(0)
    played.finish((0, 0), (1, 0))
    assert played.begun[2 * E :] == [(0, 2), (1, 2)]
    assert not played.pool._scheduler.is_ready(), "both their places are still to be filled"
    played.finish((0, 1), (0, 2))
    assert played.begun[2 * E + 2 :] == [(0, 3)]
    played.finish((1, 1))
    assert played.take(0) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    played.finish((0, 3), (1, 2))
    assert played.take(1) == [(0, 3), (1, 2)]


def test_a22_where_no_more_may_be_rolled_out_a_flat_one_fills_its_place(make: Any) -> None:
    played = make(most_extra=1)
    played.flat |= {(0, 0), (0, 1), (0, 2)}
    played.pool.begin_allowed(0)
    played.finish((0, 0), (0, 1), (0, 2))
    assert played.take(0) == [(0, 0), (0, 1), (0, 2)]


# ----------------------------------------------------------------- the place


def test_what_comes_by_itself_is_not_outstanding(make: Any) -> None:
    played = make(staleness=2)
    played.pool.begin_allowed(0)
    played.finish(*step(0))
    assert played.pool.take(0, None).outstanding is None


def test_c43_a_pool_begun_at_a_place_rolls_out_what_was_outstanding_there_and_no_more(make: Any) -> None:
    played = make(staleness=2)
    played.pool.begin_allowed(0)
    played.finish((0, 1), (2, 0))
    outstanding = played.pool.take(0, None).outstanding
    assert outstanding is not None
    assert outstanding == cursor_of(cursor_state(outstanding), 1)
    assert outstanding.again == ((0, 0), (1, 0), (1, 1))
    again = make(begin=outstanding, staleness=2)
    again.pool.begin_allowed(1)
    assert again.begun == [(0, 0), (1, 0), (1, 1), (2, 1), (3, 0), (3, 1)]
    again.finish(*again.begun)
    taken = [again.pool.take(done, None) for done in (1, 2, 3)]
    assert [keys_of(it) for it in taken] == [[(0, 0), (1, 0)], [(1, 1), (2, 1)], [(3, 0), (3, 1)]]
    assert taken[-1].outstanding is None


def test_c43_examples_rolled_out_in_place_of_flat_ones_are_outstanding_too(make: Any) -> None:
    played = make(staleness=1, most_extra=3)
    played.flat |= {(0, 0), (1, 0)}
    played.pool.begin_allowed(0)
    played.finish((0, 0), (1, 0), (0, 1), (1, 1))
    outstanding = played.pool.take(0, None).outstanding
    assert outstanding == Cursor(1, 4, ((0, 2), (1, 2)), {0: 1, 1: 1})
    state = {"next": 4, "tickets": [[0, 2], [1, 2]], "extras": {"0": 1, "1": 1}}
    assert cursor_state(outstanding) == state and cursor_of(state, 1) == outstanding, "as programs keep it"
    again = make(begin=outstanding, staleness=1, most_extra=3)
    again.flat.add((0, 2))
    again.pool.begin_allowed(1)
    assert again.begun == [(0, 2), (1, 2), (2, 0), (2, 1)]
    again.finish((0, 2))
    assert again.begun[4:] == [(0, 3)], "after those that were rolled out before"


def test_c43_what_was_left_out_is_not_rolled_out_again(make: Any) -> None:
    played = make(staleness=1)
    played.pool.begin_allowed(0)
    played.finish((1, 1), version=0)
    played.finish((0, 0), (0, 1), version=2)
    taken = played.pool.take(0, 2)
    assert [it.key for it in taken.stale] == [(1, 1)]
    assert taken.outstanding == Cursor(1, 4, ((1, 0),))


# ----------------------------------------------------------------- errors


def test_what_a_run_raises_is_raised_where_a_step_is_waited_for(make: Any) -> None:
    played = make(staleness=1)
    played.pool.begin_allowed(0)
    never = threading.Event()
    threading.Thread(
        target=lambda: played.ends[1, 0][0].set_exception(KeyboardInterrupt()), daemon=True
    ).start()
    with pytest.raises(KeyboardInterrupt):
        BackgroundCall(played.pool.workers, lambda: never.wait(PATIENCE)).result()
    never.set()
    with pytest.raises(KeyboardInterrupt):
        played.take(0)


def test_what_is_waited_for_beside_the_runs_is_given_or_raised(make: Any) -> None:
    played = make()
    assert BackgroundCall(played.pool.workers, lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(played.pool.workers, lambda: 1 / 0).result()


def test_when_it_ends_no_run_is_under_way_and_what_was_begun_is_told(make: Any) -> None:
    played = make(staleness=1)
    played.pool.begin_allowed(0)
    played.finish(*step(0))
    played.take(0)
    assert [it.key for it in played.pool.end()] == step(1)
    for run in (run for group in played.groups.values() for run in group.runs if group.key[0]):
        with pytest.raises(BaseException, match="this rollout is over"):
            run.rollout.next_call(PREDICTOR)
