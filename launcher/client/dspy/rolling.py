"""One step's rollouts: its examples' runs, and with dynamic sampling others' where nothing is to learn.

Neighbours: `training.py` asks for each step and sends what comes; `pool.py` has the runs under way, those of
later steps too; `grouping.py` makes the groups, `sampler.py` says which examples. A group whose rewards are
all equal teaches nothing (DAPO, arXiv 2503.14476): other examples are rolled out besides, up to a bound.
Every group is sent, those without variance too: the trainer leaves them out, and counts them by that reason.
Knows nothing of training or of the wire.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TypeVar

import dspy

from launcher.client.dspy.grouping import Grouped, Rules, build_groups
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.outstanding import Key, Outstanding
from launcher.client.dspy.pool import Bounds, Pool, Taken
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import ProgramRollout
from launcher.client.dspy.report import Journal, Report, counted
from launcher.client.dspy.rollouts import (
    MOST_AT_ONCE,
    MOST_WITH_PLACES,
    Finished,
    ProgramRun,
    RolloutLimits,
    Runner,
    quiet_dspy,
)
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.dspy.scoring import Metric
from launcher.client.dspy.served import Served
from launcher.client.dspy.tickets import Ended, Ticket
from launcher.client.dspy.vain import Vain
from launcher.client.dspy.validation import check_answered
from launcher.client.dspy.workers import Beside, Workers, WorkerTask
from launcher.client.schema import Group

_Result = TypeVar("_Result")
# Of a step's own rollouts, where nobody says how many more there may be.
_MOST_EXTRA = 3


@dataclass(frozen=True)
class Sampling:
    """How a step is rolled out. `most_extra`: rollouts besides, for examples whose rewards were all equal.

    `leaves_out_cut_off`: the trainer leaves answers out that were cut off, so they make no variance.
    """

    rollouts: int
    temperature: float
    seed: int
    limits: RolloutLimits
    rules: Rules
    most_extra: int = 0
    leaves_out_cut_off: bool = True

    def at_once(self, of_a_step: int) -> int:
        """Runs under way at a time, those of later steps among them, where a step has so many."""
        return self.limits.at_once(max(of_a_step, MOST_WITH_PLACES), of_a_step)


@dataclass(frozen=True)
class Rolled:
    """One step's rollouts, before they are trained. `again`: groups that were rolled out for flat ones.

    `seconds`: how long the step waited for them. `lags`: of its answers, how many were sampled by a version
    so many steps older than the one that is served. `stale`: how many examples were left out before it.
    `outstanding`: see `Taken`.
    """

    step: int
    finished: Sequence[Finished]
    grouped: Grouped
    seconds: float
    again: int = 0
    lags: Mapping[int, int] = field(default_factory=dict)
    stale: int = 0
    outstanding: Outstanding | None = None

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


def most_extra(asked: bool | int, rollouts: int) -> int:
    """How many rollouts a step may have besides its own: none, unless it is asked for, whatever the loss.

    `rollouts`: the step's own. A number that is asked for is the bound itself.
    """
    return (_MOST_EXTRA * rollouts if asked else 0) if isinstance(asked, bool) else asked


def described(sampling: Sampling, steps: int, examples: int) -> list[str]:
    """What is said once of so many steps of so many examples: more runs at once than usual, and what dynamic
    sampling may cost."""
    own, notes = examples * sampling.rollouts, list[str]()
    at_once = sampling.at_once(own)
    if at_once > MOST_AT_ONCE and not sampling.limits.threads:
        notes.append(
            f"up to {at_once} rollouts at once, as the engines have places for so many: a metric that asks a "
            "judge asks as often (num_threads=N allows N)"
        )
    if not sampling.most_extra:
        return notes
    return [
        *notes,
        "dynamic sampling: where all rewards of an example are equal another one is rolled out, up to "
        f"{counted(sampling.most_extra, 'rollout')} more in a step: up to "
        f"{steps * (own + sampling.most_extra):,} rollouts in all instead of {steps * own:,}, and as many "
        "calls of the metric and of a judge that it asks (dynamic_sampling=N allows N more in a step)",
    ]


@dataclass
class Rolling:
    """Rolls out one step after the other. `report` and `journal` are told what came.

    Between `begin` and `end` runs are under way.
    """

    program: dspy.Module
    policies: Sequence[PolicyLM]
    trainset: Sequence[dspy.Example]
    metric: Metric
    adapter: dspy.Adapter
    sampler: EpochSampler
    sampling: Sampling
    steps: int
    staleness: int
    lm: PolicyLM | None
    predictors: Predictors
    report: Report
    journal: Journal
    served: Served
    vain: Vain
    # Part of every rollout's id.
    _token: str = ""
    _pool: Pool | None = None
    _quiet: ExitStack = field(default_factory=ExitStack)
    _astray_before: int = 0
    runner: Runner = field(init=False)
    # The runs of so many steps before.
    _earlier: deque[Sequence[Finished]] = field(init=False)

    def __post_init__(self) -> None:
        self._earlier = deque(maxlen=self.staleness)
        limits = self.sampling.limits
        self.runner = Runner(self.program, self.metric, self.adapter, limits, self.lm)
        # What a frozen part asks, or a model of somebody else's, is not trained.
        self._trained = self.predictors.names - self.predictors.frozen

    @property
    def workers(self) -> Workers[Finished] | None:
        """Who does the runs, while any may be under way."""
        return None if self._pool is None else self._pool.workers

    def begin(self, done: int, outstanding: Outstanding | None) -> None:
        """From here on; nothing is asked before `go_on` or `step`.

        With new ids: a rollout that began on a lost machine must not be mixed with one made on this one.
        """
        self._token = uuid.uuid4().hex[:12]
        self._astray_before = self._astray()
        own = self.sampler.per_step * self.sampling.rollouts
        workers = self.runner.workers(self.sampling.at_once(own))
        extra = self.sampling.most_extra // self.sampling.rollouts
        bounds = Bounds(self.steps, self.sampler.per_step, extra, self.staleness)
        self._quiet.enter_context(quiet_dspy())
        self._pool = Pool(bounds, workers, self._ticket, done, outstanding)

    def end(self) -> None:
        """No run is under way any more; those in no step are counted."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.report.rollouts_unused += sum(it.begun for it in pool.end())
        self._quiet.close()

    def go_on(self, done: int) -> None:
        """Begin what may be begun once `done` steps are done; at staleness 0 only `step` does."""
        if self.staleness:
            self._live.go_on(done)

    def go_on_after(self, done: int, awaited: Callable[[], _Result]) -> Beside[_Result]:
        """The same once `awaited` has returned, which is called beside the runs."""
        return self._live.go_on_after(done, awaited)

    def beside(self, function: Callable[[], _Result]) -> Beside[_Result]:
        """What the function returns, while runs go on."""
        return Beside(self._live.workers, function)

    def step(self, step: int) -> Rolled:
        """All rollouts of step `step` (0 is the first). Raises what `check_answered` does, and Rewound."""
        began = time.monotonic()
        if not self.staleness:
            self._astray_before = self._astray()  # what a validation asked was not to be trained
        served = self.served
        taken = self._live.take(step, served.committed, served.check_still, served.is_newest)
        ended = [it.ended for it in taken.tickets if it.ended is not None]
        finished = [run for it in ended for run in it.finished]
        grouped = reduce(Grouped.with_more, (it.grouped for it in ended))
        self._count(step, taken, grouped)
        check_answered(finished, "step", [run for runs in self._earlier for run in runs])
        self._earlier.append(finished)
        self._note_astray()
        self.served.check(finished, self.predictors)
        self.vain.crashed(finished)
        again = [it.ended for it in taken.tickets if it.ended and it.key[1] >= self.sampler.per_step]
        self.report.groups_again += (groups := sum(len(it.grouped.groups) for it in again))
        self.report.rollouts_again += sum(len(it.finished) for it in again)
        seconds = time.monotonic() - began
        lags, stale = self._lags(finished), len(taken.stale)
        return Rolled(step, finished, grouped, seconds, groups, lags, stale, taken.outstanding)

    def _count(self, step: int, taken: Taken, grouped: Grouped) -> None:
        self.report.add_rollouts(grouped)
        for kind, text in grouped.notes.items():
            self.journal.once(kind, text)
        if taken.stale:
            self.report.groups_stale += len(taken.stale)
            self.report.rollouts_stale += sum(it.begun for it in taken.stale)
            self.journal.once(
                "stale",
                f"{counted(len(taken.stale), 'example')} left out as stale before step {step + 1}: too old "
                f"for staleness={self.staleness}; others are rolled out instead",
            )
        short = sum(it.ended is not None and it.ended.flat and not it.replaced for it in taken.tickets)
        if short and self.sampling.most_extra:
            self.report.short_steps += 1
            self.journal.once(
                "short of variance",
                f"step {step + 1} has {self.sampler.per_step - short} of {self.sampler.per_step} examples "
                f"with something to learn, after {counted(self.sampling.most_extra, 'rollout')} more "
                "(dynamic_sampling=N allows N)",
            )

    @property
    def _live(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("begin() comes first")
        return self._pool

    # ------------------------------------------------------------- tickets

    def _ticket(self, key: Key) -> Ticket:
        """K runs of one example, each a rollout of its own: no cached answer, no two with one seed (C44)."""
        step, index = key
        own = self.sampler.per_step
        others = self.sampler.others(step, index - own + 1) if index >= own else []
        example = others[-1] if others else self.sampler.at(step)[index]
        sampling = {"temperature": self.sampling.temperature}
        runs = [
            ProgramRun(
                self.trainset[example],
                index,
                ProgramRollout(
                    f"{self._token}-s{step}-e{index}-k{member}",
                    self.predictors,
                    sampling=sampling,
                    seed=f"{self.sampling.seed}/{step}/{index}/{member}",
                ),
            )
            for member in range(self.sampling.rollouts)
        ]
        jobs = [self.runner.job(run, (*key, member)) for member, run in enumerate(runs)]
        prefix = f"{self._token}/s{step}"
        return Ticket(key, runs, jobs, partial(self._judged, runs, jobs, prefix), self._trained)

    def _judged(self, runs: Sequence[ProgramRun], jobs: Sequence[WorkerTask[Finished]], prefix: str) -> Ended:
        finished = [self.runner.finished(run, job) for run, job in zip(runs, jobs, strict=True)]
        grouped = build_groups(finished, self.sampling.rules, prefix)
        flat = flat_examples(finished, grouped.groups, self.sampling.leaves_out_cut_off)
        versions = [it for run in runs for it in run.rollout.versions_of(self._trained)]
        return Ended(finished, grouped, bool(flat), min(versions, default=None))

    def _lags(self, finished: Sequence[Finished]) -> dict[int, int]:
        """Of the answers, how many were sampled so many steps ago."""
        versions = Counter[int]()
        for it in finished:
            versions += it.run.rollout.answered_by(self._trained)
        newest = max(self.served.committed or 0, *versions, 0)
        return {newest - version: count for version, count in sorted(versions.items(), reverse=True)}

    def _note_astray(self) -> None:
        now = self._astray()
        astray, self._astray_before = now - self._astray_before, now
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
