"""Matches the members of a step that are given as text to samples: each sample to one member.

Certain matches are given out before likely ones, the newest first, and trainable samples before others.
Samples with one name have the same text for the same question, so any of them will do.
Neighbours: text_members.py asks, once a step; the store has the samples by their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from runtime.gateway.samples import content_key, parsed_fields
from runtime.gateway.samples.parsed_fields import Names
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.shared.schema import Member

Taken = Callable[[str], bool]
# A name, and a function that finds its samples.
Way = tuple[str, Callable[[], list[SampleRef]]]


async def match(members: list[Member], store: SampleStore, taken: Taken) -> list[SampleRef | None]:
    """The sample of each member; None if no sample has its name. `taken`: whether a step has a sample."""
    named: list[Names | None] = [None] * len(members)
    if any(parsed_fields.may_have(member.messages or ()) for member in members):
        await store.name_by_fields()
        named = await asyncio.to_thread(lambda: [*map(_names, members)])
    supply = _FreeSamples(taken)
    sure = [
        [*_exact_matches(member, store), *_certain_matches(names, store)]
        for member, names in zip(members, named, strict=True)
    ]
    likely = [_likely_matches(names, store) for names in named]
    given = [supply.give(ways) for ways in sure]
    given = [
        ref or (None if supply.has(ways) else supply.give(others))
        for ref, ways, others in zip(given, sure, likely, strict=True)
    ]
    # All are taken, or for evaluation only: the selection reports it. A copy is not another sample.
    return [
        ref or supply.has([*ways, *others]) for ref, ways, others in zip(given, sure, likely, strict=True)
    ]


@dataclass
class _FreeSamples:
    """Samples by the ways they were looked for; those that are free are given out, each once."""

    taken: Taken
    given: set[str] = field(default_factory=set)
    newest: dict[str, SampleRef | None] = field(default_factory=dict)
    # The next to be given is the last.
    free: dict[str, list[SampleRef]] = field(default_factory=dict)

    def give(self, ways: Iterable[Way]) -> SampleRef | None:
        for way in ways:
            self._look(way)
            free = self.free[way[0]]
            while free:
                ref = free.pop()
                if ref.id not in self.given:
                    self.given.add(ref.id)
                    return ref
        return None

    def has(self, ways: Iterable[Way]) -> SampleRef | None:
        """The newest there is, free or not."""
        for way in ways:
            self._look(way)
            if ref := self.newest[way[0]]:
                return ref
        return None

    def _look(self, way: Way) -> None:
        name, look = way
        if name in self.free:
            return
        refs = look()
        usable = [ref for ref in refs if ref.tags.purpose == "train" and not self.taken(ref.id)]
        self.newest[name] = refs[-1] if refs else None
        self.free[name] = sorted(usable, key=lambda ref: ref.unscorable is None)


def _names(member: Member) -> Names | None:
    if member.messages is None or member.completion is None or member.tool_calls is not None:
        return None
    return parsed_fields.names(member.messages, member.completion)


def _exact_matches(member: Member, store: SampleStore) -> Iterator[Way]:
    if member.messages is not None:
        calls = content_key.calls_of(member.tool_calls)
        name = content_key.key(member.messages, member.completion or "", calls)
        yield name, lambda: store.of_content(name)


def _certain_matches(names: Names | None, store: SampleStore) -> list[Way]:
    return [] if names is None else _by_text_or_values(names.exact, names.parsed, store)


def _likely_matches(names: Names | None, store: SampleStore) -> list[Way]:
    """For clients that train without turns, or of an answer they could not parse without inputs or text."""
    if names is None:
        return []
    ways: list[Way] = [
        (names.object, lambda: store.of_fields(names.object)),
        (f"{names.exact} in part", lambda: store.of_part(names)),
    ]
    if not names.has_turns:
        ways += _by_text_or_values(names.exact_of_any_turns, names.parsed_of_any_turns, store)
        ways.append((names.object_of_any_turns, lambda: store.of_fields(names.object_of_any_turns)))
    return ways


def _by_text_or_values(exact: str, parsed: str | None, store: SampleStore) -> list[Way]:
    """This very answer, and then those with its values, unless it has none itself.

    A text that was sampled and failed may look like an adapter's text of a good one.
    """
    ways: list[Way] = [(exact, lambda: store.of_fields(exact))]
    if parsed is not None and store.may_be_written(exact, parsed):
        ways.append((parsed, lambda: store.of_fields(parsed)))
    return ways
