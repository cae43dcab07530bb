"""The scheduler by itself: groups begin, end, grow old, leave in steps and are lost, in any order.

Two plans of keys, as its two drivers have them: a training's examples by step and place, and the numbers of
given groups, which may come to an end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from launcher.client.dspy.step_keys import StepKeys, cursor_of, cursor_state
from launcher.client.scheduler import Bounds, Cursor, RolloutScheduler
from launcher.client.trajectories.ahead import StepGroups, _cursor_of, _RunningNumbers

SIZE = 2
FATES = ("waits", "answers", "ends", "ends", "is flat")
AnyKey = Any


@dataclass(eq=False)
class Rollouts:
    """A group whose answers come when the test says so."""

    key: AnyKey
    has_ended: bool = False
    replaced: bool = False
    answered: int | None = None
    is_late: bool = False

    def oldest(self) -> int | None:
        return self.answered


class Playing(RuleBasedStateMachine):
    """A program with its scheduler. A step that was taken is trained, then served; a restart loses the rest.

    `steps`: each trained step's groups. `dropped`: the groups that were too old for it or for one before.
    """

    keys_at: Callable[[Playing, Cursor[Any]], Any]

    @initialize(
        per_step=st.integers(1, 3), staleness=st.integers(0, 2), steps=st.integers(2, 8),
        most_extra=st.integers(0, 3), given=st.sampled_from([None, None, 5, 16]),
        late=st.sets(st.integers(1, 8), max_size=4),
    )  # fmt: skip
    def start(
        self, per_step: int, staleness: int, steps: int, most_extra: int, given: int | None, late: set[int]
    ) -> None:
        self.bounds = Bounds(per_step, staleness, steps)
        self.most_extra, self.given = most_extra, given if self.may_run_out else None
        self.steps: list[list[Rollouts]] = []
        self.dropped: set[AnyKey] = set()
        self.late = late  # Of a life's groups, by the order in which they begin.
        self.trained = 0  # the newest version
        self.saved = json.dumps(None)
        self.begin_life(Cursor())

    # ------------------------------------------------------------- the two drivers' parts

    may_run_out = False

    def plan(self, cursor: Cursor[Any]) -> Any:
        return StepKeys(self.bounds.per_step, self.most_extra, Counter(dict(cursor.extras)))

    def to_json(self) -> Any:
        cursor = self.keys.resumable(self.scheduler.cursor())
        return cursor and cursor_state(cursor)

    def from_json(self, state: Any, done: int) -> Cursor[Any]:
        return cursor_of(state, done) if state else Cursor(done, done * self.bounds.per_step)

    def extras(self) -> int:
        """The most extra groups that any step has of those that were begun."""
        counted = Counter(step for step, index in self.begun if index >= self.bounds.per_step)
        return max(counted.values(), default=0)

    # ------------------------------------------------------------- a life

    def begin_life(self, cursor: Cursor[Any]) -> None:
        self.cursor = cursor
        self.keys = self.plan(cursor)
        self.begun: list[AnyKey] = []
        self.lost_at_end: set[AnyKey] = set()
        self.scheduler = RolloutScheduler[Any, Rollouts](self.bounds, self.keys, self.begin, cursor)
        self.training: list[Rollouts] | None = None
        self.served, self.admitted = self.trained, len(self.steps)
        self.scheduler.admit(self.admitted)

    def begin(self, key: AnyKey) -> Rollouts | None:
        assert key not in self.scheduler.open
        if self.given is not None and key >= self.given:
            return None
        self.begun.append(key)
        return Rollouts(key, is_late=len(self.begun) in self.late)

    def in_progress(self) -> list[Rollouts]:
        return [it for it in self.scheduler.open.values() if not it.has_ended]

    @rule(
        fates=st.lists(st.sampled_from(FATES), min_size=9, max_size=9),
        late_end=st.booleans(), only_ended=st.booleans(), trains=st.booleans(), is_empty=st.booleans(), serves=st.booleans(),
    )  # fmt: skip
    def go_on(
        self, fates: list[str], late_end: bool, only_ended: bool, trains: bool, is_empty: bool, serves: bool
    ) -> None:
        """Some groups go on; then a step is taken, if there is one, or it is trained, or its version served.

        Few rules: of many, Hypothesis leaves some out of most examples, and then no step would end.
        """
        for group, fate in zip(sorted(self.in_progress(), key=lambda it: it.key), fates, strict=False):
            if fate != "waits" and group.answered is None:
                group.answered = self.served
            if fate in ("ends", "is flat") and (late_end or not group.is_late):
                self.end(group, fate == "is flat")
        if self.training is None and len(self.steps) < self.bounds.steps:
            self.take(only_ended)
        if trains and self.training is not None:
            self.train(is_empty)
        if self.training is None and (serves or not self.bounds.staleness):
            self.serve()

    def end(self, group: Rollouts, is_flat: bool) -> None:
        before = len(self.begun)
        self.scheduler.ended(group, is_flat, SIZE)
        assert len(self.begun) == before + group.replaced <= before + is_flat

    def take(self, only_ended: bool) -> None:
        groups = self.scheduler.ended_groups() if only_ended else list(self.scheduler.open.values())
        stale = self.scheduler.drop_stale(groups, self.trained)
        assert all(it.key not in self.scheduler.open for it in stale)
        self.scheduler.fill()
        self.scheduler.drop_stale(self.scheduler.ended_groups(), self.trained)
        self.scheduler.fill()
        if not self.scheduler.is_ready():
            return
        own = [it for it in self.scheduler.ended_groups() if not it.replaced]
        step, dropped = self.scheduler.take()
        self.check_step(step, own)
        self.training, self.dropping = step, {it.key for it in dropped}
        self.state = json.dumps(self.to_json())
        cursor = self.from_json(json.loads(self.state), len(self.steps) + 1)
        assert replace(cursor, extras={}) == self.scheduler.cursor()

    def check_step(self, step: list[Rollouts], own: list[Rollouts]) -> None:
        kept = [it for it in step if not it.replaced]
        assert kept == own[: self.bounds.per_step], "the oldest that had ended"
        is_the_rest = not self.scheduler.open and self.given is not None
        assert len(kept) == self.bounds.per_step or is_the_rest
        assert [it.key for it in step] == sorted({it.key for it in step})
        assert all(it.has_ended for it in step)
        for it in step:
            assert it.answered is None or self.trained - it.answered <= self.bounds.staleness

    def train(self, is_empty: bool) -> None:
        assert self.training is not None
        self.steps.append(self.training)
        self.dropped |= self.dropping
        self.trained += not is_empty
        self.saved, self.training = self.state, None

    def serve(self) -> None:
        self.served, self.admitted = self.trained, len(self.steps)
        self.scheduler.admit(self.admitted)

    @precondition(lambda self: self.steps)
    @rule()
    def restart(self) -> None:
        cursor = self.from_json(json.loads(self.saved), len(self.steps))
        self.begin_life(cursor)
        planned = range(cursor.next, cursor.next + len(self.begun))
        expected = [*cursor.again, *(self.keys.planned(it) for it in planned)]
        assert self.begun == expected[: len(self.begun)], "what was in no step, the oldest first"

    # ------------------------------------------------------------- what is always so

    @invariant()
    def no_more_are_in_progress_than_allowed(self) -> None:
        ahead = min(self.admitted + 1 + self.bounds.staleness, self.bounds.steps) - self.scheduler.taken
        filling = [it for it in self.scheduler.open.values() if not it.replaced]
        assert len(filling) <= max(0, ahead) * self.bounds.per_step
        assert self.extras() <= self.most_extra

    @invariant()
    def no_group_is_in_two_steps_and_none_is_lost(self) -> None:
        taken = [it.key for step in [*self.steps, self.training or []] for it in step]
        assert len(set(taken)) == len(taken)
        gone = self.dropped | {it.key for it in self.scheduler.stale}
        gone |= self.dropping if self.training is not None else set()
        assert not gone & set(taken)
        left = set(self.begun) - set(taken) - gone
        assert left == set(self.scheduler.open)
        cursor = self.scheduler.cursor()
        passed = {self.keys.planned(number) for number in range(cursor.next)}
        assert passed - set(taken) - gone <= set(cursor.again)
        assert not set(cursor.again) & (set(taken) | gone)

    @invariant()
    def something_can_always_go_on(self) -> None:
        can_serve = self.admitted < len(self.steps)
        is_over = len(self.steps) >= self.bounds.steps
        has_run_out = self.given is not None and not self.scheduler.open
        ready = self.training is not None or self.scheduler.is_ready() or self.in_progress()
        assert ready or can_serve or is_over or has_run_out or self.scheduler.stale

    def teardown(self) -> None:
        """Left to itself, the program comes to its end."""
        for _ in range(2 * self.bounds.steps + 1):
            self.go_on(
                ["ends"] * 99, late_end=True, only_ended=False, trains=True, is_empty=False, serves=True
            )
        has_run_out = self.given is not None and not self.scheduler.open
        assert has_run_out or len(self.steps) == self.bounds.steps, "steps are left"
        assert not self.scheduler.open


class PlayingGiven(Playing):
    """With the numbers of given groups for keys, of which there may be no more."""

    may_run_out = True

    def plan(self, cursor: Cursor[Any]) -> Any:
        return _RunningNumbers(self.bounds.per_step, self.most_extra * SIZE)

    def to_json(self) -> Any:
        self.keys.extra = 0
        return StepGroups([], [], self.scheduler.cursor(), 0).place

    def from_json(self, state: Any, done: int) -> Cursor[int]:
        return _cursor_of(state)

    def extras(self) -> int:
        return self.keys.extra // SIZE


@pytest.mark.process
@pytest.mark.parametrize("machine", [Playing, PlayingGiven])
def test_c39_c43_in_any_order_no_group_is_lost_trained_twice_or_too_old_and_steps_go_on(machine: Any) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=100, stateful_step_count=25, deadline=None, derandomize=True)
    )
