"""Finished rollouts as the groups of one step: one for each example and each predictor that asked the policy.

Neighbours: `rollouts.py` finishes them, `grpo.py` sends the groups, `schema.py` has their form. A reward goes
to the samples, by rollout, predictor and call; text is never rendered or parsed here. Knows nothing of DSPy's
objects, the wire or the optimizer's loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.request_bodies import Group, Member

_REASON_LENGTH = 80
_TEXT_LENGTH = 300

Grouping = Literal["ragged", "truncate"]
"""The calls that are trained of a predictor that some runs of an example called more often than others: all,
or only as many as each run made."""


@dataclass(frozen=True)
class RewardRules:
    """The rewards of runs that failed by their own fault, and how calls are grouped."""

    failure_score: float = 0.0
    format_failure_score: float = -1.0
    grouping: Grouping = "ragged"

    def reward(self, finished: FinishedRun, predictor: str, call: int) -> float:
        """The reward of one call of a run that is not excluded.

        The call whose answer did not parse gets the format failure, and so does one cut off at its limit: the
        reward it earned so far would teach never coming to an end. The other calls of a failed run get the
        failure score, because their own format was right.
        """
        rollout = finished.run.rollout
        if (predictor, call) in rollout.unparsed or (predictor, call) in rollout.cut_off:
            return self.format_failure_score
        if finished.score is None:
            return self.failure_score
        return finished.score.of(predictor)


EXCLUDED_OUTCOMES = frozenset({"unscored", "lost", "outside", "overdue"})
"""Outcomes that say nothing about the policy: sent without a reward, so that they are counted (C22)."""


@dataclass
class GroupingResult:
    """The groups of one step, each predictor's rewards, and the outcomes of the runs."""

    groups: list[Group] = field(default_factory=list)
    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # The rewards of each example, of all its predictors.
    by_example: list[list[float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    # Troubles by their kind, the first of each kind in full: logged once, then only counted.
    notes: dict[str, str] = field(default_factory=dict)
    # Failures of other models and of judges, by the model's name.
    external_failures: Counter[str] = field(default_factory=Counter)
    # Runs that asked the policy nothing: there is no sample to reward, so they are counted here alone.
    without_calls: int = 0
    # Calls left out because not every run of the example made as many.
    calls_truncated: int = 0

    def merged_with(self, more: GroupingResult) -> GroupingResult:
        """The union with the groups of more examples of the same step."""
        rewards = defaultdict[str, list[float]](list)
        for name, values in (*self.rewards.items(), *more.rewards.items()):
            rewards[name] += values
        return GroupingResult(
            self.groups + more.groups,
            rewards,
            self.by_example + more.by_example,
            self.outcomes + more.outcomes,
            {**more.notes, **self.notes},
            self.external_failures + more.external_failures,
            self.without_calls + more.without_calls,
            self.calls_truncated + more.calls_truncated,
        )


def build_groups(finished: Sequence[FinishedRun], rules: RewardRules, prefix: str) -> GroupingResult:
    """Group ids are `prefix/example/predictor`; runs of one example are those with the same `run.index`."""
    grouped = GroupingResult(outcomes=Counter(it.outcome for it in finished))
    by_example: dict[int, list[FinishedRun]] = defaultdict(list)
    for it in finished:
        by_example[it.run.index].append(it)
        grouped.external_failures += it.run.rollout.external_failures
        _add_notes(grouped, it)
    for index, runs in by_example.items():
        grouped.without_calls += sum(not it.run.rollout.calls for it in runs)
        grouped.by_example.append([])
        for predictor in _trained_predictors(runs):
            members = _members(grouped, runs, predictor, rules)
            if members:
                grouped.rewards[predictor] += (rewards := _rewards(members))
                grouped.by_example[-1] += rewards
                group_id = f"{prefix}/{index}/{predictor}"[:128]
                grouped.groups.append(Group(id=group_id, predictor=predictor, members=members))
    return grouped


def reason_kind(finished: FinishedRun) -> str:
    """Outcome and kind of reason: things are counted by it, so details that differ from run to run are left
    out."""
    return f"{finished.outcome}: {(finished.reason or '').partition(':')[0]}"[:_REASON_LENGTH]


def _trained_predictors(runs: Sequence[FinishedRun]) -> list[str]:
    """The predictors that used the policy in any of these runs, in the order of their first calls."""
    names = dict.fromkeys(name for it in runs for name in it.run.rollout.calls)
    return [name for name in names if name not in runs[0].run.rollout.predictors.frozen]


def _members(
    grouped: GroupingResult, runs: Sequence[FinishedRun], predictor: str, rules: RewardRules
) -> list[Member]:
    max_calls = None
    if rules.grouping == "truncate":
        made = [it.run.rollout.calls[predictor] for it in runs if it.outcome not in EXCLUDED_OUTCOMES]
        max_calls = min(made, default=0)
        grouped.calls_truncated += sum(made) - max_calls * len(made)
    asking = [it for it in runs if it.run.rollout.calls[predictor]]
    return [member for it in asking for member in _members_of(it, predictor, rules, max_calls)]


def _members_of(
    finished: FinishedRun, predictor: str, rules: RewardRules, max_calls: int | None
) -> list[Member]:
    """One member for all the predictor's calls, or one for each call if they need different rewards."""
    rollout = finished.run.rollout
    made = rollout.calls[predictor]
    if finished.outcome in EXCLUDED_OUTCOMES:
        return [Member(rollout=rollout.id, predictor=predictor, failure=reason_kind(finished))]
    rewards = [rules.reward(finished, predictor, call) for call in range(made)]
    if len(set(rewards)) == 1 and (max_calls is None or max_calls == made):
        return [Member(rollout=rollout.id, predictor=predictor, reward=rewards[0])]
    return [
        Member(rollout=rollout.id, predictor=predictor, call=call, reward=reward)
        for call, reward in enumerate(rewards[:max_calls])
    ]


def _rewards(members: Iterable[Member]) -> list[float]:
    return [it.reward for it in members if it.reward is not None]


def _add_notes(grouped: GroupingResult, finished: FinishedRun) -> None:
    if finished.reason is not None:
        text = " ".join(finished.reason.split())[:_TEXT_LENGTH]
        grouped.notes.setdefault(reason_kind(finished), f"a rollout ended {finished.outcome}: {text}")
    known = finished.run.rollout.predictors.names
    for name in finished.score.predictors if finished.score else ():
        if name not in known:
            grouped.notes.setdefault(
                f"misnamed: {name}",
                f"the metric scores a predictor {name!r}, which the program does not have; "
                f"it has {', '.join(sorted(known))}",
            )
