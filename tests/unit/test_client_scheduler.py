"""The scheduler by itself: groups begin, end, grow old, leave in steps and are lost, in any order.

Two plans of keys, as its two drivers have them: a training's examples by step and place, and the numbers of
given groups, of which there may be no more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from launcher.client.dspy.step_keys import StepKeys, cursor_of, cursor_state
from launcher.client.scheduler import Bounds, Cursor, RolloutScheduler
from launcher.client.trajectories.ahead import StepGroups, _cursor_of, _RunningNumbers

SIZE = 2
FATES = ("ends", "ends", "ends", "answers", "waits", "is flat")
MOSTLY = st.sampled_from([True, True, True, False])


@dataclass(eq=False)
class Rollouts:
    """A group that goes on when the test says so. `is_late`: only when it says so once more."""

    key: Any
    is_late: bool
    has_ended: bool = False
    replaced: bool = False
    answered: int | None = None

    def oldest(self) -> int | None:
        return self.answered


class Playing(RuleBasedStateMachine):
    """A program and its scheduler. `steps`: each trained one's groups; `dropped`: those too old for them.

    A step is taken, trained, and its version is served. A restart loses whatever was not trained.
    """

    given: int | None = None

    @initialize(
        per_step=st.integers(1, 3), staleness=st.integers(0, 2), steps=st.integers(2, 12),
        most_extra=st.integers(0, 3), late=st.sets(st.integers(1, 8), max_size=4),
    )  # fmt: skip
    def start(self, per_step: int, staleness: int, steps: int, most_extra: int, late: set[int]) -> None:
        self.bounds, self.total = Bounds(per_step, staleness, steps), steps
        self.most_extra, self.late = most_extra, late
        self.steps: list[list[Rollouts]] = []
        self.dropped: set[Any] = set()
        self.version = 0
        self.saved = json.dumps(None)
        self.begin_life(Cursor())

    # ------------------------------------------------------------- what a driver adds

    def plan(self, cursor: Cursor[Any]) -> Any:
        return StepKeys(self.bounds.per_step, self.most_extra, Counter(dict(cursor.extras)))

    def to_json(self) -> Any:
        cursor = self.keys.resumable(self.scheduler.cursor())
        return cursor and cursor_state(cursor)

    def from_json(self, state: Any, done: int) -> Cursor[Any]:
        return cursor_of(state, done) if state else Cursor(done, done * self.bounds.per_step)

    def extras(self) -> int:
        """The most extra groups that a step has."""
        counted = Counter(step for step, index in self.begun if index >= self.bounds.per_step)
        return max(counted.values(), default=0)

    # ------------------------------------------------------------- a life

    def begin_life(self, cursor: Cursor[Any]) -> None:
        self.keys, self.begun = self.plan(cursor), list[Any]()
        self.scheduler = RolloutScheduler[Any, Rollouts](self.bounds, self.keys, self.begin, cursor)
        self.training: tuple[list[Rollouts], set[Any], str] | None = None
        self.serve()
        planned = map(self.keys.planned, range(cursor.next, cursor.next + len(self.begun)))
        expected = [*cursor.again, *planned]
        assert self.begun == expected[: len(self.begun)], "what was in no step, the oldest first"

    def begin(self, key: Any) -> Rollouts | None:
        if self.given is not None and key >= self.given:
            return None
        self.begun.append(key)
        return Rollouts(key, len(self.begun) in self.late)

    def in_progress(self) -> list[Rollouts]:
        return [it for it in self.scheduler.open.values() if not it.has_ended]

    @rule(
        fates=st.lists(st.sampled_from(FATES), min_size=9, max_size=9), late_wait=MOSTLY, trains=MOSTLY,
        teaches=MOSTLY, serves=MOSTLY, restarts=st.sampled_from([None] * 12 + [0, 1, 2]),
    )  # fmt: skip
    def go_on(
        self,
        fates: list[str],
        late_wait: bool,
        trains: bool,
        teaches: bool,
        serves: bool,
        restarts: int | None,
    ) -> None:
        """Some groups go on. Then a step is taken, if it is there, trained, and served, or the program ends.

        One rule: of several, Hypothesis leaves some out of an example, which would come to no step.
        """
        for group, fate in zip(self.in_progress(), fates, strict=False):
            if fate != "waits" and group.answered is None:
                group.answered = self.served
            if fate in ("ends", "is flat") and not (group.is_late and late_wait):
                before = len(self.begun)
                self.scheduler.ended(group, fate == "is flat", SIZE)
                assert len(self.begun) == before + group.replaced <= before + (fate == "is flat")
        if self.training is None and len(self.steps) < self.total:
            self.take()
        if trains and self.training is not None:
            self.train(teaches)
        if self.training is None and (serves or not self.bounds.staleness):
            self.serve()
        if restarts is not None:  # with another staleness, as the user likes
            self.bounds = replace(self.bounds, staleness=restarts)
            self.begin_life(self.from_json(json.loads(self.saved), len(self.steps)))

    def take(self) -> None:
        for it in self.scheduler.drop_stale(self.scheduler.open.values(), self.version):
            assert self.version - (it.answered or 0) > self.bounds.staleness > 0
        self.scheduler.fill()
        if not self.scheduler.is_ready():
            return
        ended = sorted((it for it in self.scheduler.open.values() if it.has_ended), key=lambda it: it.key)
        own = [it for it in ended if not it.replaced][: self.bounds.per_step]
        step, stale = self.scheduler.take()
        assert step == [it for it in ended if it.replaced or it in own], "the oldest that had ended"
        is_the_rest = self.given is not None and not self.scheduler.open
        assert len(own) == self.bounds.per_step or is_the_rest
        ages = [self.version - it.answered for it in step if it.answered is not None]
        assert max(ages, default=0) <= self.bounds.staleness
        saved = json.dumps(self.to_json())
        again = self.from_json(json.loads(saved), len(self.steps) + 1)
        assert replace(again, extras={}) == self.scheduler.cursor()
        self.training = step, {it.key for it in stale}, saved

    def train(self, teaches: bool) -> None:
        assert self.training is not None
        step, stale, self.saved = self.training
        self.steps.append(step)
        self.dropped |= stale
        self.version += teaches
        self.training = None

    def serve(self) -> None:
        self.served, self.admitted = self.version, len(self.steps)
        self.scheduler.admit(self.admitted)
        assert self.filling() == self.allowed() or self.given is not None, "as many as are allowed"

    def teardown(self) -> None:
        """Left to itself, a program comes to its end."""
        if sys.exc_info()[0] is not None:
            return
        for _ in range(2 * self.total + 1):
            self.go_on(["ends"] * 99, False, True, True, True, None)
        has_run_out = self.given is not None and not self.scheduler.open
        assert has_run_out or len(self.steps) == self.total

    # ------------------------------------------------------------- what is always so

    def filling(self) -> int:
        return sum(not it.replaced for it in self.scheduler.open.values())

    def allowed(self) -> int:
        ahead = min(self.admitted + 1 + self.bounds.staleness, self.total) - self.scheduler.taken
        return max(0, ahead) * self.bounds.per_step

    @invariant()
    def no_more_are_in_progress_than_allowed(self) -> None:
        assert self.filling() <= self.allowed()
        assert self.extras() <= self.most_extra

    @invariant()
    def no_group_is_in_two_steps_and_none_is_lost(self) -> None:
        step, stale, _ = self.training or ([], set(), "")
        taken = [it.key for one in [*self.steps, step] for it in one]
        assert len(set(taken)) == len(taken)
        dropped = [*self.dropped, *stale, *(it.key for it in self.scheduler.stale)]
        assert len(set(dropped)) == len(dropped), "each is reported once"
        gone = {*taken, *dropped}
        assert set(self.begun) - gone == set(self.scheduler.open)
        cursor = self.scheduler.cursor()
        assert not gone & set(cursor.again) and all(self.keys.after(key) <= cursor.next for key in gone)
        assert {self.keys.planned(number) for number in range(cursor.next)} <= gone | set(cursor.again)

    @invariant()
    def something_can_always_go_on(self) -> None:
        is_waited_for = self.training is not None or self.admitted < len(self.steps)
        has_run_out = self.given is not None and not self.scheduler.open
        is_over = has_run_out or len(self.steps) == self.total
        assert is_waited_for or is_over or self.in_progress() or self.scheduler.is_ready()


class PlayingNumbers(Playing):
    """With the numbers of given groups for keys."""

    def plan(self, cursor: Cursor[Any]) -> Any:
        return _RunningNumbers(self.bounds.per_step, self.most_extra * SIZE)

    def to_json(self) -> Any:
        self.keys.extra = 0  # as its driver has it, of each step
        return StepGroups([], [], self.scheduler.cursor(), 0).place

    def from_json(self, state: Any, done: int) -> Cursor[int]:
        return _cursor_of(state)

    def extras(self) -> int:
        return self.keys.extra // SIZE


class PlayingFew(PlayingNumbers):
    """Of the given groups there are too few for all steps."""

    given = 7


@pytest.mark.process
@pytest.mark.parametrize("machine", [Playing, PlayingNumbers, PlayingFew])
def test_c39_c43_in_any_order_no_group_is_lost_trained_twice_or_too_old_and_steps_go_on(machine: Any) -> None:
    bounds = settings(max_examples=100, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=bounds)


def test_c43_with_less_staleness_than_before_what_was_outstanding_has_its_turn() -> None:
    cursor = Cursor(1, 6, ((0, 1), (1, 0), (1, 1)))
    keys = StepKeys(2, 0, Counter())
    scheduler = RolloutScheduler(Bounds(2, 0), keys, lambda key: Rollouts(key, is_late=False), cursor)
    scheduler.admit(1)
    assert [*scheduler.open] == [(0, 1), (1, 0)]
    assert scheduler.cursor() == cursor, "what has not begun is kept"
    for group in scheduler.open.values():
        scheduler.ended(group, zero_variance=False, size=SIZE)
    scheduler.take()
    assert scheduler.cursor() == Cursor(2, 6, ((1, 1),))
    scheduler.admit(2)
    assert [*scheduler.open] == [(1, 1), (3, 0)]
