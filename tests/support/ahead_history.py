"""What a run that trained ahead of itself has kept, over all its lives, and what must be true of it.

Neighbours: `tests/programs/e2e/train_ahead.py` is its program; `tests/e2e/test_ahead_killed.py` kills it and
reads the run's own files. A group is named by its planned step and a place in it; each life names its
rollouts by its own word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.client.dspy.step_keys import Key, cursor_of
from launcher.client.scheduler import Cursor
from tests.programs.e2e import train_ahead as program

_ROLLOUT = re.compile(r"^(\w+)-s(\d+)-e(\d+)-k(\d+)$")
# Of a place: whose it is, and what is known only once its step is done.
_OF_A_LIFE = ("life", "trained")


@dataclass(frozen=True)
class Rollout:
    """One by its name. `samples`: what it received, with the versions that answered; `english`: if known."""

    name: str
    english: str | None
    samples: tuple[tuple[str, int], ...]

    @property
    def group(self) -> Key:
        _, step, index, _ = _parts(self.name)
        return int(step), int(index)

    @property
    def life(self) -> str:
        return _parts(self.name)[0]

    @property
    def oldest(self) -> int:
        return min(version for _, version in self.samples)


@dataclass(frozen=True)
class Step:
    """One that is committed, with the names of the rollouts that it was sent and of its trained samples."""

    number: int
    state: dict[str, Any]
    rollouts: tuple[str, ...]
    trained: tuple[str, ...]
    counts: dict[str, Any]


@dataclass(frozen=True)
class History:
    """`begun`: what each life has said; `validated`: each validation's step and version, as the run has it;
    `summary`: of the life that ended well."""

    steps: list[Step]
    rollouts: dict[str, Rollout]
    begun: list[dict[str, Any]]
    validated: list[tuple[int, int]]
    summary: dict[str, Any]

    # ------------------------------------------------------------- what is known of it

    @cached_property
    def in_steps(self) -> set[str]:
        return {name for step in self.steps for name in step.rollouts}

    @cached_property
    def groups(self) -> dict[int, list[Key]]:
        """Those of each step."""
        return {
            it.number: list(dict.fromkeys(self.rollouts[name].group for name in it.rollouts))
            for it in self.steps
        }

    @cached_property
    def trained_groups(self) -> set[Key]:
        return {group for groups in self.groups.values() for group in groups}

    @cached_property
    def left_out(self) -> dict[Key, int]:
        """The groups that are in no step and not outstanding any more, by the step at which they went."""
        return {group: it.number for it in self.steps for group in self._gone(it.number)}

    @property
    def unused(self) -> list[Rollout]:
        return [it for name, it in self.rollouts.items() if name not in self.in_steps]

    @property
    def last_life(self) -> str | None:
        """The word of its rollouts; None where all steps were done when it began."""
        is_over = self.begun[-1]["place"]["step"] == len(self.steps)
        return None if is_over else _parts(self.steps[-1].rollouts[0])[0]

    def figures(self) -> dict[str, int]:
        """What became of every rollout."""
        stale = [it for it in self.unused if it.group in self.left_out]
        lost = [it for it in self.unused if it.group not in self.left_out and it.life != self.last_life]
        return {
            "steps": len(self.steps),
            "lives": len(self.begun),
            "rollouts": len(self.rollouts),
            "in_steps": len(self.in_steps),
            "stale": len(stale),
            "examples_stale": len(self.left_out),
            "lost_with_their_life": len(lost),
            "of_these_rolled_out_again": sum(it.group in self.trained_groups for it in lost),
            "left_at_the_end": len(self.unused) - len(stale) - len(lost),
            "samples_trained": sum(len(it.trained) for it in self.steps),
            "samples_counted": sum(sum(it.counts["dropped"].values()) for it in self.steps),
        }

    # ------------------------------------------------------------- what must be true

    def check(self, steps: int) -> None:
        numbers = list(range(1, steps + 1))
        assert [it.number for it in self.steps] == numbers, "each step once"
        assert [it.state["step"] for it in self.steps] == numbers, "of one training"
        assert len({it.state["id"] for it in self.steps}) == 1
        due = [0, *range(program.VALIDATED_EVERY, steps, program.VALIDATED_EVERY), steps]
        assert self.validated == [(step, step) for step in due], "each validation once, of its own version"
        self.check_once()
        self.check_lags()
        self.check_examples()
        self.check_places()
        self.check_resumed()
        self.check_last_life()

    def check_once(self) -> None:
        """Nothing is in two steps, and all that a step was sent is trained or counted."""
        _assert_each_once(name for step in self.steps for name in step.rollouts)
        _assert_each_once(name for step in self.steps for name in step.trained)
        _assert_each_once(group for groups in self.groups.values() for group in groups)
        for step in self.steps:
            given = {sample for name in step.rollouts for sample, _ in self.rollouts[name].samples}
            counts = step.counts
            assert set(step.trained) <= given, step.number
            assert (counts["samples"], counts["trained"]) == (len(given), len(step.trained)), step.number
            assert counts["trained"] + sum(counts["dropped"].values()) == counts["samples"], step.number

    def check_lags(self) -> None:
        for step in self.steps:
            ages = [step.number - 1 - self.rollouts[name].oldest for name in step.rollouts]
            assert 0 <= min(ages) <= max(ages) <= program.STALENESS, (step.number, ages)

    def check_examples(self) -> None:
        """Each group is whole, and has the example that the sampler says; none is passed over."""
        sampler, own = program.sampler(), program.PER_STEP
        members = Counter(self.rollouts[name].group for name in self.in_steps)
        assert set(members.values()) == {program.ROLLOUTS}
        for it in self.rollouts.values():
            step, index = it.group
            example = (
                sampler.at(step)[index] if index < own else sampler.extra_examples(step, index - own + 1)[-1]
            )
            assert it.english in (f"{example} cats", None), it.name
        begun = {it.group for it in self.rollouts.values()}
        for step, index in self.trained_groups:
            besides = {(step, one) for one in range(own, index)}
            assert besides <= self.trained_groups | set(self.left_out) | begun, (step, index)

    def check_places(self) -> None:
        """From one step's place to the next nothing is missing but what had become too old for it."""
        for group, step in self.left_out.items():
            ages = [step - 1 - it.oldest for it in self.unused if it.group == group and it.samples]
            assert ages and max(ages) > program.STALENESS, f"{group} went at step {step}: {ages}"

    def check_resumed(self) -> None:
        """Each life went on from the place of a committed step, as that step had it, and none goes back."""
        states = {it.number: it.state for it in self.steps}
        places = [life["place"] for life in self.begun]
        for place in places:
            if place["step"]:
                assert _without_its_life(place) == _without_its_life(states[place["step"]])
        assert [it["step"] for it in places] == sorted(it["step"] for it in places)

    def check_last_life(self) -> None:
        """Its report has counted every rollout that was recorded in it."""
        report, own = (
            self.summary["report"],
            [it for it in self.rollouts.values() if it.life == self.last_life],
        )
        assert self.summary["steps"] == len(self.steps)
        assert report["rollouts"] == sum(it.name in self.in_steps for it in own)
        assert len(own) <= report["rollouts"] + report["rollouts_stale"] + report["rollouts_unused"]
        assert report["trained"] + sum(report["dropped"].values()) == report["samples"]

    def check_like(self, other: History) -> None:
        """Both trained all own examples of their steps, but for those that each has left out."""
        own = [
            {it for it in one.trained_groups if it[1] < program.PER_STEP and it[0] < len(one.steps)}
            for one in (self, other)
        ]
        of_a_whole_run = {
            (step, index) for step in range(len(self.steps)) for index in range(program.PER_STEP)
        }
        for one, groups in zip((self, other), own, strict=True):
            ahead = one.outstanding(len(one.steps))
            assert of_a_whole_run - groups <= set(one.left_out) | set(ahead.again)

    # ------------------------------------------------------------- places

    def outstanding(self, step: int) -> Cursor[Key]:
        """What was to be rolled out once so many steps were done."""
        state = self.steps[step - 1].state if step else {}
        return cursor_of(state["pool"], step) if "pool" in state else Cursor(step, step * program.PER_STEP)

    def _gone(self, step: int) -> set[Key]:
        before, after = self.outstanding(step - 1), self.outstanding(step)
        own = {divmod(number, program.PER_STEP) for number in range(before.next, after.next)}
        return (set(before.again) | own) - set(after.again) - set(self.groups[step])


def _parts(rollout: str) -> tuple[str, ...]:
    found = _ROLLOUT.match(rollout)
    assert found, rollout
    return found.groups()


def _assert_each_once(names: Iterable[Hashable]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    assert not twice


def _without_its_life(place: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in place.items() if name not in _OF_A_LIFE}
