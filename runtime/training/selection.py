"""Which samples a step trains, and what becomes of the rest: everything named is trained or counted.

Neighbours: steps.py asks when a step is taken in and again when it is taken out; samples come from the
gateway's store; the result is a `Batch`. Computes no advantage and tokenises nothing (C1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.schema import Group, Member, StepCounts
from runtime.serving.samples import SampleRef, SampleStore
from runtime.training.batch import Batch

# A reason becomes a key in counts, metrics and terminals.
_REASON_CHARACTERS = 80
# How a completion ends when the policy itself ended it; "length" and the like cut it.
_WHOLE = ("stop", "tool_calls")


@dataclass
class Selection:
    """The samples to train, each with the member that rewards it, and the counts of everything named."""

    groups: list[Group] = field(default_factory=list)
    # (index into groups, the member), for members with at least one sample to train.
    members: list[tuple[int, Member]] = field(default_factory=list)
    # (sample, index into members).
    samples: list[tuple[SampleRef, int]] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)

    @property
    def ids(self) -> list[str]:
        return [ref.id for ref, _ in self.samples]


def select(
    groups: Iterable[Group],
    store: SampleStore,
    *,
    taken: Callable[[str], bool],
    lag: Callable[[int], int],
    max_lag: int,
) -> Selection:
    """Sort every sample the groups name into trained or dropped, with the reason.

    `taken(sample id)`: another step has it. `lag(version)`: steps committed since that version (C39).
    """
    result = Selection()
    dropped: dict[str, int] = {}
    named: set[str] = set()

    def why_not(ref: SampleRef) -> str | None:
        if ref.tags.purpose != "train":
            return "evaluation"  # C48
        if ref.id in named:
            return "named twice"
        if taken(ref.id):
            return "already trained"
        if ref.unscorable is not None:
            return ref.unscorable
        return "stale" if lag(ref.version) > max_lag else None

    found_in_all = members_in_all = 0
    for group in groups:
        group_index = len(result.groups)
        result.groups.append(group)
        for member in group.members:
            members_in_all += 1
            refs = _refs(group, member, store)
            found_in_all += len(refs)
            refused = _refused(member) or (None if refs else "no sample")
            if refused is not None:
                _add(dropped, refused, max(1, len(refs)))
                continue
            member_index = len(result.members)
            for ref in refs:
                reason = why_not(ref)
                named.add(ref.id)
                if reason is not None:
                    _add(dropped, reason, 1)
                    continue
                if len(result.members) == member_index:
                    result.members.append((group_index, member))
                result.samples.append((ref, member_index))
    result.counts = StepCounts(
        groups=len(result.groups),
        members=members_in_all,
        samples=found_in_all,
        trained=len(result.samples),
        groups_without_variance=_groups_without_variance(result),
        dropped=dropped,
    )
    return result


def build(selection: Selection, store: SampleStore, meta: dict[str, Any]) -> Batch:
    """The batch of a selection: the engine's own ids and logprobs, copied. `meta` is added to its JSON."""
    tokens: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    temperature: list[float] = []
    truncated: list[int] = []
    for ref, _ in selection.samples:
        exchange, sample = store.load(ref)
        prompt = exchange.prompts[sample.prompt]
        ids = np.asarray(prompt + sample.completion_ids, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        mask[len(prompt) :] = 1
        behaviour = np.zeros(len(ids), np.float32)
        behaviour[len(prompt) :] = np.asarray(sample.logprobs, np.float32)
        tokens.append(ids)
        sampled.append(mask)
        logprobs.append(behaviour)
        temperature.append(exchange.temperature)
        truncated.append(sample.finish_reason not in _WHOLE)
    sampled_all = np.concatenate(sampled)
    counts = selection.counts.model_copy(update={"sampled_tokens": int(sampled_all.sum())})
    return Batch(
        tokens=np.concatenate(tokens),
        sampled=sampled_all,
        logprobs=np.concatenate(logprobs),
        offsets=np.cumsum([0, *(len(ids) for ids in tokens)], dtype=np.int64),
        temperature=np.asarray(temperature, np.float32),
        version=np.asarray([ref.version for ref, _ in selection.samples], np.int64),
        truncated=np.asarray(truncated, np.uint8),
        member=np.asarray([member for _, member in selection.samples], np.int64),
        reward=np.asarray([member.reward for _, member in selection.members], np.float32),
        group=np.asarray([group for group, _ in selection.members], np.int64),
        meta=meta | _meta(selection, counts),
    )


def _meta(selection: Selection, counts: StepCounts) -> dict[str, Any]:
    return {
        "groups": [{"id": group.id, "predictor": group.predictor} for group in selection.groups],
        "members": [
            {"rollout": member.rollout, "predictor": member.predictor, "call": member.call, "group": group}
            for group, member in selection.members
        ],
        "samples": [
            {
                "id": ref.id,
                "rollout": ref.tags.rollout,
                "predictor": ref.tags.predictor,
                "call": ref.tags.call,
            }
            for ref, _ in selection.samples
        ],
        "counts": counts.model_dump(),
    }


def _refs(group: Group, member: Member, store: SampleStore) -> list[SampleRef]:
    """The samples a member's reward is about."""
    predictor = member.predictor if member.predictor is not None else group.predictor
    return [
        ref
        for ref in store.of_rollout(member.rollout)
        if (predictor is None or ref.tags.predictor == predictor)
        and (member.call is None or ref.tags.call == member.call)
    ]


def _refused(member: Member) -> str | None:
    """Why a member has no reward to train with (C22); None when it has one."""
    if member.reward is None:
        return (member.failure or "no reward")[:_REASON_CHARACTERS]
    return None if math.isfinite(member.reward) else "reward not finite"


def _add(dropped: dict[str, int], reason: str, count: int) -> None:
    dropped[reason] = dropped.get(reason, 0) + count


def _groups_without_variance(selection: Selection) -> int:
    """Groups whose rewards teach nothing: all the same, or fewer than two."""
    rewards: dict[int, Set[float]] = {index: set() for index in range(len(selection.groups))}
    for group, member in selection.members:
        assert member.reward is not None
        rewards[group] = {*rewards[group], member.reward}
    return sum(len(values) < 2 for values in rewards.values())
