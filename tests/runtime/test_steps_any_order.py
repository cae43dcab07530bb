"""The queue of steps in any order: sent, sent again, trained, refused, served; killed, and its machine lost.

What a user may count on is in played_steps.py, and looked at after each rule.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from runtime.gateway.steps import queue
from runtime.shared.schema import StepRequest
from tests.runtime.played_steps import SOON, Asked, PlayedSteps
from tests.support.dying_process import memory_folder

REWARDS = st.sampled_from([0.0, 1.0, 0.5, None])
MEMBERS = st.lists(
    st.tuples(st.sampled_from(["new", "new", "new", "earlier", "unknown"]), REWARDS), min_size=2, max_size=3
)
# Before which of its changes of the disk the gateway dies, or finds it full: mostly before none.
WHEN = st.sampled_from([None] * 24 + [*range(1, 13)])
PLACES = st.integers(0, 99)
FIRST = st.sampled_from(
    [""] * 8 + ["sends again"] * 4 + ["sends another body", "restores", "is killed", "is killed"]
    + ["loses its machine"]
)  # fmt: skip


class StepsInAnyOrder(RuleBasedStateMachine):
    """A program, its gateway, a trainer and engines."""

    @initialize(staleness=st.integers(0, 3), thread_seconds=st.sampled_from([0.0, 0.01]))
    def begin(self, staleness: int, thread_seconds: float) -> None:
        self.folder, self.patch = memory_folder(), pytest.MonkeyPatch()
        self.patch.setattr(queue, "DISK_SECONDS", SOON)
        self.run = PlayedSteps(self.folder, staleness, thread_seconds)
        self.count = 0

    @rule(
        steps=st.lists(MEMBERS, max_size=3), back=st.integers(0, 2), late=st.none() | PLACES,
        trains=st.sampled_from(["commits", "commits", "commits", "fails", "waits", "is gone"]),
        engines=st.sampled_from(["serve", "serve", "serve", "refuse", "full", "wait"]),
        dies=WHEN, full=WHEN, torn=st.floats(0, 1), first=FIRST, place=PLACES,
    )  # fmt: skip
    def go_on(
        self,
        first: str,
        place: int,
        steps: list[Any],
        back: int,
        late: int | None,
        trains: str,
        engines: str,
        dies: int | None,
        full: int | None,
        torn: float,
    ) -> None:
        """Steps are sent, one more answer comes to one of them, the trainer and the engines do their part.

        One rule: of several, Hypothesis leaves some out of an example, which would come to no step.
        """
        run = self.run
        self._begin_with(first, place, dies, torn)
        run.engines = engines
        asked = [self._asked(members, back) for members in steps]
        if dies is not None:
            run.process.plan(dies, run.process.kill)
        if full is not None and full != dies:
            run.process.plan(full, run.process.find_full)
        run.send(asked)
        if late is not None and run.rollouts and not run.process.is_dead:
            run.roll_out(run.rollouts[late % len(run.rollouts)], back)
        if trains == "is gone":
            run.trainer_failure = "the trainer failed: no such model"
        elif trains != "waits":
            run.train(fails=trains == "fails")
        run.go_on(SOON)
        run.trainer_failure = ""
        self._survive(torn)

    def _begin_with(self, first: str, place: int, dies: int | None, torn: float) -> None:
        run, known = self.run, [one for one in self.run.asked if one.is_known]
        if first == "sends again" and run.asked:  # whoever heard no answer does, and so may others
            if dies is not None:
                run.process.plan(dies, run.process.kill)
            run.send([run.asked[place % len(run.asked)]])
            self._survive(torn)
        elif first == "sends another body" and known:
            run.send_other_body(known[place % len(known)])
        elif first == "restores":  # a checkpoint that is kept, or was
            newest = max(run.committed, default=0)
            run.send([self._numbered(restores=f"step-{max(1, newest - place % 5):06d}")])
        elif first == "is killed":
            run.kill(torn, dies)
            run.observe()
        elif first == "loses its machine":
            run.lose_machine(place % 2)
            run.observe()

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.run.finish()
        finally:
            self.run.close()
            self.patch.undo()
            shutil.rmtree(self.folder)

    def _survive(self, torn: float) -> None:
        if self.run.process.is_dead:
            self.run.kill(torn)
        self.run.process.forget_plans()
        self.run.observe()

    def _asked(self, members: list[tuple[str, float | None]], back: int) -> Asked:
        described = []
        for place, (which, reward) in enumerate(members):
            name = f"{which} {self.count} {place}"
            if which == "new":
                self.run.roll_out(name, back)
            elif which == "earlier" and self.run.rollouts:
                name = self.run.rollouts[(7 * self.count + place) % len(self.run.rollouts)]
            described.append({"rollout": name, "reward": reward})
        asked = self._numbered()
        content = {"key": asked.key, "groups": [{"id": "g", "members": described}]}
        asked.request = StepRequest.model_validate(content | {"client_state": asked.client_state})
        return asked

    def _numbered(self, restores: str = "") -> Asked:
        self.count += 1
        return Asked(f"k{self.count}", restores=restores, client_state={"at": self.count})


def test_g18_c40_in_any_order_no_step_is_lost_and_no_sample_trained_twice() -> None:
    bounds = settings(
        max_examples=30, stateful_step_count=15, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    run_state_machine_as_test(StepsInAnyOrder, settings=bounds)
