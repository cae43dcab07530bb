"""The index over the journal: samples by rollout and by request.

An answer that was not received is no sample, nor is one that its client requested again (C6, C52).
Neighbours: proxy.py records every answered request here, receipts.py reports the received ones; steps take
their samples from here by rollout; a known request id gets its stored answer. Kept in memory: names and
places, not tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.gateway.requests import distribution
from runtime.gateway.samples.field_index import FieldIndex
from runtime.gateway.samples.journal import (
    DeliveryConfirmed,
    DeliveryLost,
    DeliveryUncertain,
    Exchange,
    IndexEntry,
    Journal,
    LineLocation,
    Sample,
)
from runtime.gateway.samples.parsed_fields import Names
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.turn_index import TurnIndex
from runtime.gateway.samples.turns import COMPLETE_REASONS, SampledTurn
from runtime.shared.grammar import repeatable

# Request ids remembered for a retry; beyond this the oldest are forgotten (the samples are not).
REMEMBERED_REQUESTS = 1 << 16
# Samples without a tag that a group may still name, by its id or its content: most programs never will.
REMEMBERED_UNTAGGED = 1 << 16
# vLLM's number for -inf, and for a missing logprob.
NO_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A remembered request."""

    digest: str
    place: LineLocation


class SampleStore:
    """All samples of the run. Not thread-safe: the gateway's event loop is its only user."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self._by_rollout: defaultdict[str, list[SampleRef]] = defaultdict(list)
        self._by_content: defaultdict[str, list[SampleRef]] = defaultdict(list)
        self._by_id: dict[str, SampleRef] = {}
        # Sample id → its name by content, if it has one, and itself: those without a tag are forgotten.
        self._untagged: OrderedDict[str, tuple[str | None, SampleRef]] = OrderedDict()
        self._fields = FieldIndex(self._journal.read_text)
        self.turns = TurnIndex()
        self._requests: OrderedDict[str, StoredRequest] = OrderedDict()
        self._unreceived: set[str] = set()
        # Digest of a request → those with it whose connections broke after their answers.
        self._doubtful: defaultdict[str, set[str]] = defaultdict(set)
        self.count = 0
        for place, head in self._journal.index_entries():
            self._read(place, head)

    def record(self, exchange: Exchange) -> None:
        """Append an answered request. Once this returns, the kill of any process loses nothing of it."""
        self._index(self._journal.append(exchange), exchange)

    def of_rollout(self, rollout: str) -> list[SampleRef]:
        """Every sample of a rollout that reached its client, in the order of the answers."""
        return self._received(self._by_rollout.get(rollout, []))

    def unreceived_of_rollout(self, rollout: str) -> list[SampleRef]:
        """The samples of a rollout that are not known to be received."""
        return [ref for ref in self._by_rollout.get(rollout, []) if ref.request in self._unreceived]

    def knows(self, rollout: str) -> bool:
        """Whether anything was ever sampled for a rollout, received or not."""
        return rollout in self._by_rollout

    def knows_sample(self, sample: str) -> bool:
        """Whether there ever was such a sample, received or not."""
        return sample in self._by_id

    def of_content(self, content: str) -> list[SampleRef]:
        """Every sample of an untagged request with this name by content, in the order of the answers."""
        return self._received(self._by_content.get(content, []))

    async def name_by_fields(self) -> None:
        """Name all new samples by their parsed fields."""
        await self._fields.catch_up()

    def of_fields(self, name: str) -> list[SampleRef]:
        """Every sample of an untagged request with this name by its fields, as far as they are named."""
        return self._received(self._fields.of(name))

    def may_be_written(self, exact: str, parsed: str) -> bool:
        """Whether a client may have written the text with these names from parsed fields."""
        return self._fields.may_be_written(exact, parsed)

    def of_part(self, names: Names) -> list[SampleRef]:
        """The samples with this very answer to a question that has these inputs and more."""
        return self._received(self._fields.of_part(names))

    def of_sample(self, sample: str) -> list[SampleRef]:
        """The sample with this id, or none."""
        return self._received(self._of_id(sample))

    def unreceived_of_sample(self, sample: str) -> list[SampleRef]:
        """The sample with this id if it is not known to be received, or none."""
        return [ref for ref in self._of_id(sample) if ref.request in self._unreceived]

    def load(self, ref: SampleRef) -> tuple[Exchange, Sample]:
        """The tokens behind a name."""
        exchange = self._journal.read(ref.place)
        return exchange, exchange.samples[ref.position]

    def load_turn(self, ref: SampleRef) -> SampledTurn:
        """The ids behind a name."""
        exchange, sample = self.load(ref)
        return SampledTurn(
            ref,
            exchange.prompts[sample.prompt],
            sample.completion_ids,
            sample.logprobs,
            exchange.temperature,
            sample.finish_reason not in COMPLETE_REASONS,
            None if exchange.conversation is None else exchange.conversation.apart,
            repeatable(exchange.settings),
        )

    def stored(self, request: str) -> StoredRequest | None:
        """The remembered entry of a request id."""
        return self._requests.get(request)

    def answer(self, request: str) -> Exchange:
        """The stored exchange of a request id."""
        return self._journal.read(self._requests[request].place)

    def is_received(self, request: str) -> bool:
        """Whether the answer of a recorded request counts as received."""
        return request not in self._unreceived

    def mark_received(self, request: str) -> None:
        """The answer reached its client. Raises OSError if the disk is full, as do the next two.

        Receipts come again, in their order, when the answer to them is lost. A receipt that is known already
        still settles the doubtful answers of its call.
        """
        stored = self._requests.get(request)
        if request in self._unreceived or (stored and stored.digest in self._doubtful):
            self._journal.append(DeliveryConfirmed(request))
            self._claim(request)

    def mark_uncertain(self, request: str) -> None:
        """Its client's connection broke after the answer: the same call, asked again, replaces it."""
        if request in self._requests and request not in self._unreceived:
            self._journal.append(DeliveryUncertain(request))
            self._doubt(request)

    def mark_lost(self, request: str) -> None:
        """The answer counted as received, and was not."""
        if request in self._requests and request not in self._unreceived:
            self._journal.append(DeliveryLost(request))
            self._unreceived.add(request)

    def _read(self, place: LineLocation, head: IndexEntry) -> None:
        """Take up one line of an earlier process."""
        if head.claim is not None:
            self._claim(head.claim)
        elif head.doubt is not None:
            self._doubt(head.doubt)
        elif head.loss is not None:
            self._unreceived.add(head.loss)
        else:
            self._index(place, head)

    def _index(self, place: LineLocation, line: Exchange | IndexEntry) -> None:
        self._requests[line.request] = StoredRequest(line.digest, place)
        if len(self._requests) > REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
        if line.delivered:
            self._replace_uncertain(line.request)
        else:
            self._unreceived.add(line.request)
        self.count += len(line.samples)
        turns: list[tuple[str | None, SampleRef]] = []
        for position, sample in enumerate(line.samples):
            ref = SampleRef(
                sample.id,
                line.tags,
                line.version,
                sample.unscorable,
                line.request,
                place,
                position,
                sample.retokenised,
                sample.around,
            )
            self._by_id[ref.id] = ref
            turns.append((sample.turn, ref))
            if line.tags.rollout is not None:
                self._by_rollout[line.tags.rollout].append(ref)
            else:
                self._index_untagged(sample.content, ref)
        if line.conversation is not None:
            self.turns.note(line.conversation, turns)

    def _index_untagged(self, content: str | None, ref: SampleRef) -> None:
        if content is not None:
            self._by_content[content].append(ref)
            self._fields.note(ref)
        self._untagged[ref.id] = content, ref
        if len(self._untagged) > REMEMBERED_UNTAGGED:
            _, (oldest, forgotten) = self._untagged.popitem(last=False)
            self._forget(oldest, forgotten)

    def _forget(self, content: str | None, ref: SampleRef) -> None:
        if self._by_id.get(ref.id) is ref:
            del self._by_id[ref.id]
        if content is not None:
            self._fields.forget(ref)
            self._by_content[content].remove(ref)
            if not self._by_content[content]:
                del self._by_content[content]

    def _of_id(self, sample: str) -> list[SampleRef]:
        found = self._by_id.get(sample)
        return [] if found is None else [found]

    def _received(self, refs: list[SampleRef]) -> list[SampleRef]:
        return [ref for ref in refs if ref.request not in self._unreceived]

    def _claim(self, request: str) -> None:
        self._unreceived.discard(request)
        self._replace_uncertain(request)

    def _doubt(self, request: str) -> None:
        if request in self._requests:
            self._doubtful[self._requests[request].digest].add(request)

    def _replace_uncertain(self, request: str) -> None:
        """This answer was received: earlier ones to the same call, whose connections broke, were not."""
        if request in self._requests:
            doubtful = self._doubtful.pop(self._requests[request].digest, set())
            self._unreceived |= doubtful - {request}


def why_not_trainable(
    settings: Mapping[str, Any],
    completion_ids: list[int],
    logprobs: list[float | None],
    *,
    repeats_grammars: Callable[[], bool] = distribution.never,
) -> str | None:
    """The reason a completion can never be trained on; None if it can (C9, C10)."""
    if setting := distribution.distorted_by(settings, repeats_grammars=repeats_grammars):
        return setting
    if not completion_ids:
        return "empty completion"
    if len(logprobs) != len(completion_ids):
        return "logprobs missing"
    if not all(is_logprob(value) for value in logprobs):
        return "logprob not finite"
    return None


def is_logprob(value: float | None) -> bool:
    """A number the sampled token can really have had."""
    return value is not None and math.isfinite(value) and value > NO_LOGPROB
