"""Selects the samples that a step trains: everything named is trained, or counted with its reason.

Neighbours: queue.py asks when a step is taken in and handover.py again when it is given to the trainer;
sample_ownership.py knows whose a sample is; samples come from the gateway's store; turns.py joins them into
sequences; batch_building.py makes arrays of them. Computes no advantage and tokenises nothing (C1).
Everything except a Snapshot reads tokens, a minute's work for long rollouts, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Protocol

from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.samples.turns import SampledTurn, join
from runtime.gateway.steps.sample_ownership import SampleOwnership
from runtime.gateway.steps.sequence_splits import split_warning
from runtime.shared import redaction
from runtime.shared.learnable import Usable
from runtime.shared.schema import Group, Member
from runtime.shared.statuses import StepCounts

# A reason becomes a key in counts, metrics and terminals.
_REASON_CHARACTERS = 80


@dataclass(frozen=True)
class Named:
    """A sample that a member names, or a member that names none; why nothing of it is trained, if so."""

    # Index into the selection's groups.
    group: int
    member: Member
    ref: SampleRef | None
    dropped: str | None


@dataclass
class Selection:
    """The sequences to train, each with the member that rewards it, and the counts of everything named."""

    groups: list[Group] = field(default_factory=list)
    # (index into groups, the member), for members with at least one sample to train.
    members: list[tuple[int, Member]] = field(default_factory=list)
    # (the samples that are its turns, index into members).
    sequences: list[tuple[list[SampleRef], int]] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)
    named: list[Named] = field(default_factory=list)
    # By the version that sampled them, the age in steps of the trained samples.
    staleness: dict[int, int] = field(default_factory=dict)

    @property
    def samples(self) -> list[tuple[SampleRef, int]]:
        """Every sample to train, with the index of its member."""
        return [(ref, member) for turns, member in self.sequences for ref in turns]

    @property
    def ids(self) -> list[str]:
        return [ref.id for ref, _ in self.samples]

    def why_untrained(self, found: Usable) -> dict[str, str]:
        """Why the trainer leaves samples out, by their ids. `found`: of the selection's batch."""
        return {ref.id: why for place, why in found.why.items() for ref in self.sequences[place][0]}


class Source(Protocol):
    """The source of sample names and their tokens: a SampleStore, or a Snapshot of it."""

    def of_rollout(self, rollout: str) -> list[SampleRef]: ...
    def unreceived_of_rollout(self, rollout: str) -> list[SampleRef]: ...
    def of_sample(self, sample: str) -> list[SampleRef]: ...
    def unreceived_of_sample(self, sample: str) -> list[SampleRef]: ...
    def load_turn(self, ref: SampleRef) -> SampledTurn: ...


@dataclass(frozen=True)
class Snapshot:
    """A store's answers about some groups at one moment. Only tokens are read later, as any thread may."""

    store: SampleStore
    rollouts: dict[str, list[SampleRef]]
    unreceived: dict[str, list[SampleRef]]
    samples: dict[str, list[SampleRef]]
    unreceived_samples: dict[str, list[SampleRef]]

    @classmethod
    def of(cls, groups: Iterable[Group], store: SampleStore) -> Snapshot:
        """Look up every name that the groups' members have."""
        members = [member for group in groups for member in group.members]
        named = {sample for member in members for sample in ids_of(member)}
        samples = {sample: store.of_sample(sample) for sample in named}
        unreceived_samples = {sample: store.unreceived_of_sample(sample) for sample in named}
        rollouts = {one.rollout for one in members}
        received = {rollout: store.of_rollout(rollout) for rollout in rollouts}
        unreceived = {rollout: store.unreceived_of_rollout(rollout) for rollout in rollouts}
        return cls(store, received, unreceived, samples, unreceived_samples)

    def of_rollout(self, rollout: str) -> list[SampleRef]:
        """See SampleStore."""
        return self.rollouts[rollout]

    def unreceived_of_rollout(self, rollout: str) -> list[SampleRef]:
        """See SampleStore."""
        return self.unreceived[rollout]

    def of_sample(self, sample: str) -> list[SampleRef]:
        """See SampleStore."""
        return self.samples[sample]

    def unreceived_of_sample(self, sample: str) -> list[SampleRef]:
        """See SampleStore."""
        return self.unreceived_samples[sample]

    def load_turn(self, ref: SampleRef) -> SampledTurn:
        """See SampleStore."""
        return self.store.load_turn(ref)


async def select_for(
    number: int | None, groups: list[Group], samples: SampleStore, ownership: SampleOwnership
) -> Selection:
    """Select in a thread, because it reads every token. The caller holds `ownership.sorting`.

    `number`: the step whose samples are its own; None for one that has none yet.
    """
    selection = await asyncio.to_thread(
        select,
        groups,
        Snapshot.of(groups, samples),
        taken=ownership.taken_from(number),
        staleness_of=ownership.staleness_of(),
        max_staleness=ownership.max_staleness,
    )
    if line := split_warning(selection.counts):
        ownership.warnings.warn_once("sealed", line)
    return selection


def select(
    groups: Iterable[Group],
    store: Source,
    *,
    taken: Callable[[str], bool],
    staleness_of: Callable[[int], int],
    max_staleness: int,
) -> Selection:
    """Sort every sample the groups name into trained or dropped, with the reason.

    `taken(sample id)`: another step has it. `lag(version)`: steps committed since that version; a sequence is
    as old as its oldest turn (C39).
    """
    sorting = _SelectionBuilder(store, taken, staleness_of, max_staleness)
    for group in groups:
        sorting.result.groups.append(group)
        for member in group.members:
            sorting.take(group, member)
    return sorting.counted()


@dataclass
class _SelectionBuilder:
    """One selection while it is made."""

    store: Source
    taken: Callable[[str], bool]
    staleness_of: Callable[[int], int]
    max_staleness: int
    result: Selection = field(default_factory=Selection)
    dropped: Counter[str] = field(default_factory=Counter)
    named: set[str] = field(default_factory=set)
    sealed: Counter[str] = field(default_factory=Counter)
    members = found = unreceived = 0
    # Of the member at hand: sample id → why it is dropped.
    why: dict[str, str] = field(default_factory=dict)

    def take(self, group: Group, member: Member) -> None:
        """Sort one member's samples."""
        refs = _refs(group, member, self.store)
        self.members += 1
        self.found += len(refs)
        unreceived = _unreceived(group, member, self.store)
        self.unreceived += unreceived
        missing = "answer not received" if unreceived else "no sample"
        refused = _refused(member) or (None if refs else missing)
        index = len(self.result.groups) - 1
        if refused is not None:
            self.dropped[refused] += max(1, len(refs))
            self.result.named += [Named(index, member, ref, refused) for ref in refs or [None]]
            return
        self._count_missing(member)
        self.why = {}
        sequences = [turns for turns in self._sequences(refs) if self._is_fresh(turns)]
        self.result.named += [Named(index, member, ref, self.why.get(ref.id)) for ref in refs]
        if sequences:
            self.result.members.append((index, member))
            rewarded = len(self.result.members) - 1
            self.result.sequences += [(turns, rewarded) for turns in sequences]

    def _count_missing(self, member: Member) -> None:
        """Count the missing answers of a conversation; the others are trained without them."""
        for sample in member.samples or ():
            if not self.store.of_sample(sample):
                lost = self.store.unreceived_of_sample(sample)
                self.dropped["answer not received" if lost else "no sample"] += 1

    def counted(self) -> Selection:
        """The selection, with its counts."""
        trained = self.result.samples
        self.result.staleness = {
            version: self.staleness_of(version) for version in {ref.version for ref, _ in trained}
        }
        self.result.counts = StepCounts(
            groups=len(self.result.groups),
            members=self.members,
            samples=self.found,
            trained=len(trained),
            retokenised=sum(ref.retokenised for ref, _ in trained),
            turns_joined=len(trained) - len(self.result.sequences),
            sealed=self.sealed.total(),
            sealed_by=dict(self.sealed),
            groups_without_variance=_groups_without_variance(self.result),
            unreceived=self.unreceived,
            dropped=dict(self.dropped),
        )
        return self.result

    def _sequences(self, refs: list[SampleRef]) -> Iterator[list[SampleRef]]:
        """The trainable samples of a member, as sequences of turns."""
        for part in _by_predictor([ref for ref in refs if self._is_usable(ref)]):
            sequences, sealed = join(part, self.store.load_turn)
            self.sealed += sealed
            yield from sequences

    def _is_usable(self, ref: SampleRef) -> bool:
        reason = self._why_not(ref)
        self.named.add(ref.id)
        if reason is not None:
            self.dropped[reason] += 1
            self.why[ref.id] = reason
        return reason is None

    def _why_not(self, ref: SampleRef) -> str | None:
        if ref.tags.purpose != "train":
            return "evaluation"  # C48
        if ref.id in self.named:
            return "named twice"
        if self.taken(ref.id):
            return "already trained"
        return ref.unscorable

    def _is_fresh(self, turns: list[SampleRef]) -> bool:
        fresh = self.staleness_of(min(ref.version for ref in turns)) <= self.max_staleness
        if not fresh:
            self.dropped["stale"] += len(turns)
            self.why |= dict.fromkeys((ref.id for ref in turns), "stale")
        return fresh


def ids_of(member: Member) -> list[str]:
    """The samples that a member names by their own ids."""
    return member.samples or ([] if member.sample is None else [member.sample])


def is_known(member: Member, store: SampleStore) -> bool:
    """Whether anything was ever sampled under a member's tag, or any of its named samples exists."""
    return store.knows(member.rollout) or any(map(store.knows_sample, ids_of(member)))


def _refs(group: Group, member: Member, store: Source) -> list[SampleRef]:
    """The samples a member's reward is about."""
    if ids := ids_of(member):
        return [ref for sample in ids for ref in store.of_sample(sample)]
    return [ref for ref in store.of_rollout(member.rollout) if _is_named(ref, group, member)]


def _unreceived(group: Group, member: Member, store: Source) -> int:
    """How many answers a member's reward would be about, had anyone received them (C52)."""
    if ids := ids_of(member):
        return sum(len(store.unreceived_of_sample(sample)) for sample in ids)
    refs = store.unreceived_of_rollout(member.rollout)
    return sum(_is_named(ref, group, member) for ref in refs)


def _is_named(ref: SampleRef, group: Group, member: Member) -> bool:
    """Whether one of a member's rollout's samples is of the predictor and the call it names."""
    predictor = member.predictor if member.predictor is not None else group.predictor
    return (predictor is None or ref.tags.predictor == predictor) and (
        member.call is None or ref.tags.call == member.call
    )


def _by_predictor(refs: list[SampleRef]) -> Iterator[list[SampleRef]]:
    """Samples apart by the predictor that asked, each in their order."""
    for predictor in dict.fromkeys(ref.tags.predictor for ref in refs):
        yield [ref for ref in refs if ref.tags.predictor == predictor]


def _refused(member: Member) -> str | None:
    """The reason why a member has no reward to train with (C22); None when it has one.

    The text is a program's own: secrets are hidden before it is cut, because half a key does not look like
    one.
    """
    if member.reward is None:
        return redaction.hide(member.failure or "no reward")[:_REASON_CHARACTERS]
    return None if math.isfinite(member.reward) else "reward not finite"


def _groups_without_variance(selection: Selection) -> int:
    """Groups whose rewards teach nothing: all the same, or fewer than two."""
    rewards: dict[int, Set[float]] = {index: set() for index in range(len(selection.groups))}
    for group, member in selection.members:
        assert member.reward is not None
        rewards[group] = {*rewards[group], member.reward}
    return sum(len(values) < 2 for values in rewards.values())
