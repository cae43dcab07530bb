"""What was sampled, by rollout and by request: the index over the journal.

Neighbours: proxy.py records every answered request here; steps take their samples from here by rollout; a
request id seen before gets its stored answer. Kept in memory: names and places, not tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.serving import support
from runtime.serving.journal import Claim, Exchange, Head, Journal, Place, Sample, Tags

# Request ids remembered for a retry; beyond this the oldest are forgotten (the samples are not).
REMEMBERED_REQUESTS = 1 << 16
# Samples without a tag that a group may still name by their content: most programs never will.
REMEMBERED_UNTAGGED = 1 << 16
# What vLLM writes in place of -inf, and where it has no logprob at all.
NO_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample's name and what decides whether it can be trained on; its tokens are read when needed."""

    id: str
    tags: Tags
    version: int
    unscorable: str | None
    request: str
    place: Place
    position: int
    # The client gave the text of it; see journal.Sample.
    retokenised: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A remembered request."""

    digest: str
    place: Place
    delivered: bool


class SampleStore:
    """All samples of the run. Not thread-safe: the gateway's event loop is its only user."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self._by_rollout: defaultdict[str, list[SampleRef]] = defaultdict(list)
        self._by_content: defaultdict[str, list[SampleRef]] = defaultdict(list)
        # Sample id → its name by content and itself; the samples of a rollout are found by that.
        self._untagged: OrderedDict[str, tuple[str, SampleRef]] = OrderedDict()
        self._requests: OrderedDict[str, Stored] = OrderedDict()
        self._undelivered: set[str] = set()
        self.count = 0
        for place, head in self._journal.heads():
            if head.claim is None:
                self._index(place, head)
            else:
                self._claim(head.claim)

    def record(self, exchange: Exchange) -> None:
        """Append an answered request. Once this returns, the kill of any process loses nothing of it."""
        self._index(self._journal.append(exchange), exchange)

    def of_rollout(self, rollout: str) -> list[SampleRef]:
        """Every sample of a rollout that reached its client, in the order of the answers."""
        return self._delivered(self._by_rollout.get(rollout, []))

    def of_content(self, content: str) -> list[SampleRef]:
        """Every sample of an untagged request with this name by content, in the order of the answers."""
        return self._delivered(self._by_content.get(content, []))

    def of_sample(self, sample: str) -> list[SampleRef]:
        """The sample of an untagged request with this id, or none."""
        found = self._untagged.get(sample)
        return [] if found is None else self._delivered([found[1]])

    def load(self, ref: SampleRef) -> tuple[Exchange, Sample]:
        """The tokens behind a name."""
        exchange = self._journal.read(ref.place)
        return exchange, exchange.samples[ref.position]

    def stored(self, request: str) -> Stored | None:
        """What is remembered of a request id."""
        return self._requests.get(request)

    def answer(self, request: str) -> Exchange:
        """The stored exchange of a request id, which thereby counts as delivered."""
        stored = self._requests[request]
        if not stored.delivered:
            self._journal.append(Claim(request))
            self._claim(request)
        return self._journal.read(stored.place)

    def _index(self, place: Place, line: Exchange | Head) -> None:
        self._requests[line.request] = Stored(line.digest, place, line.delivered)
        if len(self._requests) > REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
        if not line.delivered:
            self._undelivered.add(line.request)
        self.count += len(line.samples)
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
            )
            if line.tags.rollout is not None:
                self._by_rollout[line.tags.rollout].append(ref)
            elif sample.content is not None:
                self._index_untagged(sample.content, ref)

    def _index_untagged(self, content: str, ref: SampleRef) -> None:
        self._by_content[content].append(ref)
        self._untagged[ref.id] = (content, ref)
        if len(self._untagged) > REMEMBERED_UNTAGGED:
            _, (oldest, forgotten) = self._untagged.popitem(last=False)
            self._by_content[oldest].remove(forgotten)
            if not self._by_content[oldest]:
                del self._by_content[oldest]

    def _delivered(self, refs: list[SampleRef]) -> list[SampleRef]:
        return [ref for ref in refs if ref.request not in self._undelivered]

    def _claim(self, request: str) -> None:
        self._undelivered.discard(request)
        if request in self._requests:
            self._requests[request] = replace(self._requests[request], delivered=True)


def unscorable(
    settings: Mapping[str, Any], completion_ids: list[int], logprobs: list[float | None]
) -> str | None:
    """Why a completion can never be trained on; None when it can (C9, C10)."""
    if setting := support.cut_by(settings):
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
