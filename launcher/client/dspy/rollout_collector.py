"""One step's rollouts: its examples' runs, and with dynamic sampling those of others in place of
zero-variance groups.

Neighbours: `training.py` asks for each step and sends it; `rollout_pool.py` has the runs in progress, also of
later steps; `grouping.py` makes the groups, `sampler.py` chooses the examples. A group whose rewards are all
equal teaches nothing (DAPO, arXiv 2503.14476): other examples are rolled out besides, up to a bound. Every
group is sent, those without variance too: the trainer leaves them out, and counts them by that reason. Knows
nothing of training or of the wire.
"""

from __future__ import annotations

import math
import textwrap
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from statistics import fmean
from typing import TypeVar

from launcher.client import correlation
from launcher.client.dspy.examples import TrainingData
from launcher.client.dspy.grouping import GroupingResult, build_groups
from launcher.client.dspy.grpo_config import GRPOConfig
from launcher.client.dspy.program_failures import ProgramFailures
from launcher.client.dspy.program_rollout import ProgramRollout
from launcher.client.dspy.report import Journal, plural
from launcher.client.dspy.rollout_group import Ended, RolloutGroup
from launcher.client.dspy.rollout_pool import ReadyGroups, RolloutPool
from launcher.client.dspy.rollouts import (
    DEFAULT_CONCURRENCY,
    FinishedRun,
    ProgramRun,
    RolloutLimits,
    Runner,
    quiet_dspy,
)
from launcher.client.dspy.served_version import ServedVersion
from launcher.client.dspy.step_keys import Key
from launcher.client.dspy.validation import raise_if_unanswered
from launcher.client.dspy.workers import BackgroundCall, Workers, WorkerTask
from launcher.client.request_bodies import Group
from launcher.client.scheduler import Bounds, Cursor
from launcher.client.schema import StepStatus
from launcher.client.step_record import StepRecord, StepRollouts

_Result = TypeVar("_Result")
_FAILURE_LENGTH = 160


@dataclass(frozen=True)
class StepBatch:
    """Step `step`'s rollouts (0 is the first), before they are trained.

    `first_failure`: why the first run without a score has none. `seconds`: how long the step waited for them.
    `resampled`: the number of groups that were rolled out for zero-variance ones. `stale`: the number of
    examples that were left out before it. `outstanding`: see `ReadyGroups`.
    """

    step: int
    groups: Sequence[Group]
    rollouts: StepRollouts
    first_failure: str | None
    seconds: float
    resampled: int
    stale: int
    outstanding: Cursor[Key] | None

    def record(self, epoch: int, status: StepStatus, train_seconds: float) -> StepRecord:
        """The step's record, once the run has the step's status."""
        return StepRecord(
            step=self.step + 1,
            epoch=epoch,
            rollouts=self.rollouts,
            status=status,
            rollout_seconds=self.seconds,
            train_seconds=train_seconds,
            resampled=self.resampled,
            stale=self.stale,
        )


def sampling_notes(config: GRPOConfig, limits: RolloutLimits) -> list[str]:
    """Notes on a concurrency above the default, and on the price of dynamic sampling."""
    notes = list[str]()
    at_once = limits.concurrency_ahead(config.rollouts_per_step)
    if at_once > DEFAULT_CONCURRENCY and not limits.threads:
        notes.append(
            f"up to {at_once} rollouts at once, as the engines have places for so many: a metric that asks a "
            "judge asks as often (num_threads=N allows N)"
        )
    if not config.max_extra_rollouts:
        return notes
    own = config.num_train_steps * config.rollouts_per_step
    most = own + config.num_train_steps * config.max_extra_rollouts
    return [
        *notes,
        "dynamic sampling: where all rewards of an example are equal another one is rolled out, up to "
        f"{plural(config.max_extra_rollouts, 'rollout')} more in a step: up to "
        f"{most:,} rollouts in all instead of {own:,}, and as many "
        "calls of the metric and of a judge that it asks (dynamic_sampling=N allows N more in a step)",
    ]


@dataclass
class RolloutCollector:
    """Rolls out one step after the other; `journal` gets the results.

    Between `begin` and `end` runs are in progress. `drops_truncated`: the trainer leaves answers out that
    were cut off, so they make no variance.
    """

    config: GRPOConfig
    runner: Runner
    data: TrainingData
    journal: Journal
    served: ServedVersion
    failures: ProgramFailures
    temperature: float
    drops_truncated: bool
    # Part of every rollout's id.
    _token: str = field(default="", init=False)
    _pool: RolloutPool | None = field(default=None, init=False)
    _quiet: ExitStack = field(default_factory=ExitStack, init=False)
    _untagged_before: int = field(default=0, init=False)
    # The runs of so many steps before.
    _earlier: deque[Sequence[FinishedRun]] = field(init=False)

    def __post_init__(self) -> None:
        self._earlier = deque(maxlen=self.config.staleness)
        self._trained = self.runner.predictors.trained

    @property
    def workers(self) -> Workers[FinishedRun] | None:
        """The workers of the runs, while any may be in progress."""
        return None if self._pool is None else self._pool.workers

    def begin(self, done: int, outstanding: Cursor[Key] | None) -> None:
        """From here on; nothing is asked before `begin_allowed` or `step`.

        With new ids: a rollout that began on a lost machine must not be mixed with one made on this one.
        """
        self._token = uuid.uuid4().hex[:12]
        self._untagged_before = self._untagged_requests()
        config = self.config
        workers = self.runner.workers(self.runner.limits.concurrency_ahead(config.rollouts_per_step))
        per_step = config.num_dspy_examples_per_grpo_step
        extra = config.max_extra_rollouts // config.num_rollouts_per_grpo_step
        bounds = Bounds(per_step, config.staleness, config.num_train_steps)
        self._quiet.enter_context(quiet_dspy())
        cursor = outstanding or Cursor(done, done * per_step)
        self._pool = RolloutPool(bounds, extra, workers, self._make_group, cursor)

    def end(self) -> None:
        """No run is in progress any more; those in no step are counted."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self.journal.report.rollouts_unused += sum(it.begun for it in pool.end())
        self._quiet.close()

    def begin_allowed(self, done: int) -> None:
        """Begin the runs that are allowed once `done` steps are done; at staleness 0 only `step` does."""
        if self.config.staleness:
            self._live.begin_allowed(done)

    def begin_allowed_after(self, done: int, awaited: Callable[[], _Result]) -> BackgroundCall[_Result]:
        """The same once `awaited` has returned, which is called beside the runs."""
        return self._live.begin_allowed_after(done, awaited)

    def in_background(self, function: Callable[[], _Result]) -> BackgroundCall[_Result]:
        """The function's result, called while runs go on."""
        return BackgroundCall(self._live.workers, function)

    def step(self, step: int) -> StepBatch:
        """All rollouts of step `step`, from 0. Raises as `raise_if_unanswered` does, and Rewound."""
        began = time.monotonic()
        if not self.config.staleness:
            self._untagged_before = self._untagged_requests()  # a validation's are not to be trained
        served = self.served
        taken = self._live.take(step, served.committed, served.check_still_served, served.is_newest)
        ended = [it.ended for it in taken.groups if it.ended is not None]
        finished = [run for it in ended for run in it.finished]
        grouped = reduce(GroupingResult.merged_with, (it.grouped for it in ended))
        self._count(step, taken, grouped)
        raise_if_unanswered(finished, "step", [run for runs in self._earlier for run in runs])
        self._earlier.append(finished)
        self._report_untagged()
        served.check_runs(finished, self.runner.predictors)
        self.failures.crashed(finished)
        return StepBatch(
            step=step,
            groups=grouped.groups,
            rollouts=step_rollouts(finished, grouped, self._staleness_counts(finished)),
            first_failure=next((it.reason for it in finished if it.reason), None),
            seconds=time.monotonic() - began,
            resampled=self._count_resampled(taken.groups),
            stale=len(taken.stale),
            outstanding=taken.outstanding,
        )

    def _count_resampled(self, groups: Iterable[RolloutGroup]) -> int:
        """How many groups were rolled out besides the step's own."""
        per_step, report = self.config.num_dspy_examples_per_grpo_step, self.journal.report
        resampled = [it.ended for it in groups if it.ended and it.key[1] >= per_step]
        count = sum(len(it.grouped.groups) for it in resampled)
        report.groups_again += count
        report.rollouts_again += sum(len(it.finished) for it in resampled)
        return count

    def _count(self, step: int, taken: ReadyGroups, grouped: GroupingResult) -> None:
        self.journal.report.add_rollouts(grouped)
        for kind, text in grouped.notes.items():
            self.journal.note_once(kind, text)
        if taken.stale:
            self.journal.report.groups_stale += len(taken.stale)
            self.journal.report.rollouts_stale += sum(it.begun for it in taken.stale)
            self.journal.note_once(
                "stale",
                f"{plural(len(taken.stale), 'example')} left out as stale before step {step + 1}: too old "
                f"for staleness={self.config.staleness}; others are rolled out instead",
            )
        short = sum(
            it.ended is not None and it.ended.zero_variance and not it.replaced for it in taken.groups
        )
        per_step, extra = self.config.num_dspy_examples_per_grpo_step, self.config.max_extra_rollouts
        if short and extra:
            self.journal.report.short_steps += 1
            self.journal.note_once(
                "short of variance",
                f"step {step + 1} has {per_step - short} of {per_step} examples with something to learn, "
                f"after {plural(extra, 'rollout')} more (dynamic_sampling=N allows N)",
            )

    @property
    def _live(self) -> RolloutPool:
        if self._pool is None:
            raise RuntimeError("begin() comes first")
        return self._pool

    # ------------------------------------------------------------- groups

    def _make_group(self, key: Key) -> RolloutGroup:
        """K runs of one example, each a rollout of its own: no cached answer, no two with one seed (C44)."""
        step, index = key
        sampler, own = self.data.sampler, self.config.num_dspy_examples_per_grpo_step
        others = sampler.extra_examples(step, index - own + 1) if index >= own else []
        example = others[-1] if others else sampler.at(step)[index]
        sampling = {"temperature": self.temperature}
        runs = [
            ProgramRun(
                self.data.trainset[example],
                index,
                ProgramRollout(
                    f"{self._token}-s{step}-e{index}-k{member}",
                    self.runner.predictors,
                    sampling=sampling,
                    seed=f"{self.config.seed}/{step}/{index}/{member}",
                ),
            )
            for member in range(self.config.num_rollouts_per_grpo_step)
        ]
        jobs = [self.runner.job(run, (*key, member)) for member, run in enumerate(runs)]
        prefix = f"{self._token}/s{step}"
        return RolloutGroup(key, runs, jobs, partial(self._judged, runs, jobs, prefix), self._trained)

    def _judged(
        self, runs: Sequence[ProgramRun], jobs: Sequence[WorkerTask[FinishedRun]], prefix: str
    ) -> Ended:
        finished = [self.runner.finished_run(run, job) for run, job in zip(runs, jobs, strict=True)]
        grouped = build_groups(finished, self.config.reward_rules, prefix)
        zero_variance = zero_variance_examples(finished, grouped.groups, self.drops_truncated)
        versions = [it for run in runs for it in run.rollout.versions_of(self._trained)]
        return Ended(finished, grouped, bool(zero_variance), min(versions, default=None))

    def _staleness_counts(self, finished: Sequence[FinishedRun]) -> dict[int, int]:
        """The number of answers by their age in steps."""
        versions = Counter[int]()
        for it in finished:
            versions += it.run.rollout.answers_by_version(self._trained)
        newest = max(self.served.committed or 0, *versions, 0)
        return {newest - version: count for version, count in sorted(versions.items(), reverse=True)}

    def _report_untagged(self) -> None:
        now = self._untagged_requests()
        untagged, self._untagged_before = now - self._untagged_before, now
        if untagged:
            self.journal.note_once(
                "untagged",
                f"{untagged} calls came from threads the program started itself: they belong to no "
                "rollout and are not trained. Start them with dspy.Parallel, or in copy_context()",
            )
            self.journal.report.calls_outside_rollouts += untagged

    def _untagged_requests(self) -> int:
        engines = {id(policy.policy): policy.policy for policy in self.runner.trained.policies}
        return sum(engine.untagged_requests for engine in engines.values())


def step_rollouts(
    finished: Sequence[FinishedRun], grouped: GroupingResult, staleness: Mapping[int, int]
) -> StepRollouts:
    """The figures of a step's runs."""
    answered = [it for it in finished if it.outcome not in ("lost", "overdue")]
    rollouts = [it.run.rollout for it in finished]
    return StepRollouts(
        rewards=grouped.rewards,
        by_example=grouped.by_example,
        outcomes=grouped.outcomes,
        parse_rate=_mean(it.parsed for it in answered),
        cut_off_rate=_mean(it.cut_off for it in answered),
        length=_mean(tokens for it in rollouts for tokens in it.lengths),
        repetition=_mean(share for it in rollouts for share in it.repeated),
        reward_length=_followed(finished, lambda it: sum(it.lengths)),
        reward_repetition=_followed(finished, lambda it: _mean(it.repeated)),
        staleness=staleness,
        failure=next((_short(it.reason) for it in finished if it.outcome == "outside" and it.reason), None),
    )


def _followed(finished: Sequence[FinishedRun], measure: Callable[[ProgramRollout], float]) -> float:
    """How closely the scores follow a figure of the answers, among the runs of an example."""
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for it in finished:
        if it.score is not None and it.run.rollout.lengths:
            groups[id(it.run.example)].append((it.score.value, measure(it.run.rollout)))
    return correlation.within_groups(groups.values())


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _FAILURE_LENGTH, placeholder=" …")


def _mean(values: Iterable[float]) -> float:
    """NaN of none."""
    found = list(values)
    return fmean(found) if found else math.nan


def zero_variance_examples(
    finished: Iterable[FinishedRun], groups: Iterable[Group], drops_truncated: bool
) -> frozenset[int]:
    """The examples, by their place in the step, whose groups all have known rewards without variance.

    An example whose runs tell nothing about the policy (a judge was away) is not among them: others would
    fare no better.
    """
    runs = {it.run.rollout.id: it for it in finished}
    varied: dict[int, bool] = {}
    for group in groups:
        known, counting = set[float](), set[float]()
        for member in group.members:
            if member.reward is None:
                continue
            known.add(member.reward)
            if not (drops_truncated and _is_cut_off(runs[member.rollout], member.predictor, member.call)):
                counting.add(member.reward)
        if known:
            index = runs[group.members[0].rollout].run.index
            varied[index] = varied.get(index, False) or len(counting) > 1
    return frozenset(index for index, it in varied.items() if not it)


def _is_cut_off(finished: FinishedRun, predictor: str | None, call: int | None) -> bool:
    """Whether every answer of a member was cut off."""
    rollout = finished.run.rollout
    calls = range(rollout.calls[predictor or ""]) if call is None else (call,)
    return all((predictor, it) in rollout.cut_off for it in calls)
