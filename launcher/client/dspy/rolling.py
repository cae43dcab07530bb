"""One step's rollouts: its examples' runs, and with dynamic sampling others' where nothing is to learn.

Neighbours: `training.py` asks for each step and sends what comes; `rollouts.py` runs, `grouping.py` makes the
groups, `sampler.py` says which examples. A group whose rewards are all equal teaches nothing (DAPO, arXiv
2503.14476): other examples are rolled out besides, up to a bound. Every group is sent, those without variance
too: the trainer leaves them out, and counts them by that reason. Knows nothing of training or of the wire.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import dspy

from launcher.client.bodies import Group
from launcher.client.dspy.grouping import Grouped, Rules, build_groups
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.report import Journal, Report, counted
from launcher.client.dspy.rollouts import Finished, Limits, Run, run_all
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.dspy.scoring import Metric
from launcher.client.dspy.served import Served
from launcher.client.dspy.tagging import Predictors, Rollout
from launcher.client.dspy.vain import Vain
from launcher.client.dspy.validation import check_answered

# Of a step's own rollouts, where nobody says how many more there may be.
_MOST_EXTRA = 3
# The loss that dynamic sampling was published with.
_ITS_LOSS = "dapo"


@dataclass(frozen=True)
class Sampling:
    """How a step is rolled out. `most_extra`: rollouts besides, for examples whose rewards were all equal.

    `leaves_out_cut_off`: the trainer leaves answers out that were cut off, so they make no variance.
    """

    rollouts: int
    temperature: float
    seed: int
    limits: Limits
    rules: Rules
    most_extra: int = 0
    leaves_out_cut_off: bool = True


@dataclass(frozen=True)
class Rolled:
    """One step's rollouts, before they are trained. `again`: groups that were rolled out for flat ones."""

    step: int
    finished: Sequence[Finished]
    grouped: Grouped
    seconds: float
    again: int = 0

    @property
    def parse_rate(self) -> float:
        """Of the runs that were answered, the share whose every answer parsed."""
        return sum(it.parsed for it in self._answered) / len(self._answered)

    @property
    def cut_off_rate(self) -> float:
        """Of the runs that were answered, the share with an answer that ended at its length limit."""
        return sum(it.cut_off for it in self._answered) / len(self._answered)

    @property
    def _answered(self) -> list[Finished]:
        return [it for it in self.finished if it.outcome not in ("lost", "overdue")]


def most_extra(asked: bool | int | None, loss: str | None, rollouts: int) -> int:
    """How many rollouts a step may have besides its own: none, unless the loss is dapo, or it is asked for.

    `rollouts`: the step's own. A number that is asked for is the bound itself.
    """
    if asked is None:
        asked = loss == _ITS_LOSS
    return (_MOST_EXTRA * rollouts if asked else 0) if isinstance(asked, bool) else asked


def described(sampling: Sampling, asked: bool | int | None) -> list[str]:
    """What is said of it once; nothing where it is off."""
    if not sampling.most_extra:
        return []
    why = "" if asked is not None else f" (the loss is {_ITS_LOSS}; dynamic_sampling=False turns it off)"
    return [
        f"dynamic sampling{why}: where all rewards of an example are equal another one is rolled out, "
        f"up to {counted(sampling.most_extra, 'rollout')} more in a step"
    ]


@dataclass
class Rolling:
    """Rolls out one step after the other. `report` and `journal` are told what came."""

    program: dspy.Module
    policies: Sequence[PolicyLM]
    trainset: Sequence[dspy.Example]
    metric: Metric
    adapter: dspy.Adapter
    sampler: EpochSampler
    sampling: Sampling
    lm: PolicyLM | None
    predictors: Predictors
    report: Report
    journal: Journal
    served: Served
    vain: Vain
    # Part of every rollout's id.
    _token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def begin_anew(self) -> None:
        """New ids: a rollout that began on a lost machine must not be mixed with one made on this one."""
        self._token = uuid.uuid4().hex[:12]

    def step(self, step: int) -> Rolled:
        """All rollouts of step `step` (0 is the first). Raises what `check_answered` does, and Rewound."""
        began = time.monotonic()
        rolled = self._round(step, 0, self.sampler.at(step))
        missing = self._missing(rolled)
        while missing and (more := self._more(step, rolled, missing)):
            extra = self._round(step, rolled.examples, more)
            rolled = rolled.with_more(extra)
            missing = self._missing(rolled)
        if missing and self.sampling.most_extra:
            self.report.short_steps += 1
            self.journal.once(
                "short of variance",
                f"step {step + 1} has {self.sampler.per_step - missing} of {self.sampler.per_step} examples "
                f"with something to learn, after {counted(self.sampling.most_extra, 'rollout')} more "
                "(dynamic_sampling=N allows N)",
            )
        self.vain.crashed(rolled.finished)
        again = rolled.grouped.groups[rolled.own_groups :]
        self.report.groups_again += len(again)
        self.report.rollouts_again += len(rolled.finished) - self.sampler.per_step * self.sampling.rollouts
        return Rolled(step, rolled.finished, rolled.grouped, time.monotonic() - began, len(again))

    def _more(self, step: int, rolled: _Rounds, missing: int) -> list[int]:
        """The examples to roll out next: others than so far, as many as are missing and may be."""
        had = rolled.examples - self.sampler.per_step
        left = self.sampling.most_extra // self.sampling.rollouts - had
        return self.sampler.others(step, had + min(missing, left))[had:] if left > 0 else []

    def _missing(self, rolled: _Rounds) -> int:
        return len(rolled.flat) - (rolled.examples - self.sampler.per_step)

    def _round(self, step: int, first: int, examples: Sequence[int]) -> _Rounds:
        """These examples' runs, counted from example `first` of the step."""
        astray = self._astray()
        runs, limits = self._runs(step, first, examples), self.sampling.limits
        finished = run_all(self.program, runs, self.metric, self.adapter, limits, self.lm)
        grouped = build_groups(finished, self.sampling.rules, f"{self._token}/s{step}")
        self.report.add_rollouts(grouped)
        for kind, text in grouped.notes.items():
            self.journal.once(kind, text)
        check_answered(finished, "step")
        self._note_astray(self._astray() - astray)
        self.served.check(finished, self.predictors)
        flat = flat_examples(finished, grouped.groups, self.sampling.leaves_out_cut_off)
        return _Rounds(finished, grouped, flat, len(examples), len(grouped.groups))

    def _runs(self, step: int, first: int, examples: Sequence[int]) -> list[Run]:
        """E × K runs, each a rollout of its own: no answer from a cache, no two with one seed (C44)."""
        sampling = {"temperature": self.sampling.temperature}
        return [
            Run(
                self.trainset[example],
                index,
                Rollout(
                    f"{self._token}-s{step}-e{index}-k{member}",
                    self.predictors,
                    sampling=sampling,
                    seed=f"{self.sampling.seed}/{step}/{index}/{member}",
                ),
            )
            for index, example in enumerate(examples, first)
            for member in range(self.sampling.rollouts)
        ]

    def _note_astray(self, astray: int) -> None:
        if astray:
            self.journal.once(
                "astray",
                f"{astray} calls came from threads the program started itself: they belong to no "
                "rollout and are not trained. Start them with dspy.Parallel, or in copy_context()",
            )
            self.report.calls_outside_rollouts += astray

    def _astray(self) -> int:
        engines = {id(policy.policy): policy.policy for policy in self.policies}
        return sum(engine.astray for engine in engines.values())


@dataclass(frozen=True)
class _Rounds:
    """What has been rolled out of a step so far: of so many examples, these without variance.

    `own_groups`: the groups of its own examples, which come first.
    """

    finished: list[Finished]
    grouped: Grouped
    flat: frozenset[int]
    examples: int
    own_groups: int

    def with_more(self, more: _Rounds) -> _Rounds:
        return replace(
            self,
            finished=self.finished + more.finished,
            grouped=self.grouped.with_more(more.grouped),
            flat=self.flat | more.flat,
            examples=self.examples + more.examples,
        )


def flat_examples(
    finished: Iterable[Finished], groups: Iterable[Group], leaves_out_cut_off: bool
) -> frozenset[int]:
    """The examples, by their place in the step, of which every group's rewards are known and all equal.

    One whose runs say nothing about the policy (a judge was away) is not: others would fare no better.
    """
    runs = {it.run.rollout.id: it for it in finished}
    varied: dict[int, bool] = {}
    for group in groups:
        known, counting = set[float](), set[float]()
        for member in group.members:
            if member.reward is None:
                continue
            known.add(member.reward)
            if not (leaves_out_cut_off and _is_cut_off(runs[member.rollout], member.predictor, member.call)):
                counting.add(member.reward)
        if known:
            index = runs[group.members[0].rollout].run.index
            varied[index] = varied.get(index, False) or len(counting) > 1
    return frozenset(index for index, it in varied.items() if not it)


def _is_cut_off(finished: Finished, predictor: str | None, call: int | None) -> bool:
    """Whether every answer that a member is about was cut off."""
    rollout = finished.run.rollout
    calls = range(rollout.calls[predictor or ""]) if call is None else (call,)
    return all((predictor, it) in rollout.cut_off for it in calls)
