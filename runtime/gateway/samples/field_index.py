"""Finds samples by the parsed fields of their texts (parsed_fields.py).

Most programs name no samples so. Samples are noted as they come, and named from the journal when a step has
members given as text; each time only the new ones.
Neighbours: samples.py notes and forgets, matching.py asks. The gateway's event loop is its only user, except
for `named`, which is work for a thread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from runtime.gateway.samples import parsed_fields
from runtime.gateway.samples.answer_text import text_by_choice
from runtime.gateway.samples.journal import ExchangeText, LineLocation
from runtime.gateway.samples.parsed_fields import Names
from runtime.gateway.samples.sample_ref import SampleRef

Read = Callable[[LineLocation], ExchangeText]


class FieldIndex:
    """The untagged samples that are not for evaluation, by their names. `read` reads the journal."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._unnamed: dict[str, SampleRef] = {}
        self._names: dict[str, Names] = {}
        # One name → samples, in the order of the answers.
        self._samples: defaultdict[str, dict[str, SampleRef]] = defaultdict(dict)
        self._naming = asyncio.Lock()

    def note(self, ref: SampleRef) -> None:
        """Note a new sample."""
        if ref.tags.purpose == "train":
            self._unnamed[ref.id] = ref

    def forget(self, ref: SampleRef) -> None:
        """A sample that is no longer remembered."""
        self._unnamed.pop(ref.id, None)
        if names := self._names.pop(ref.id, None):
            for name in names.all:
                self._samples[name].pop(ref.id, None)
                if not self._samples[name]:
                    del self._samples[name]

    async def catch_up(self) -> None:
        """Name all new samples."""
        async with self._naming:  # the second caller finds them named
            came = [*self._unnamed.values()]
            named = await asyncio.to_thread(self.named, came)
            for ref, names in zip(came, named, strict=True):
                if self._unnamed.pop(ref.id, None) is ref and names is not None:
                    self._names[ref.id] = names
                    for name in names.all:
                        self._samples[name][ref.id] = ref

    def named(self, refs: Iterable[SampleRef]) -> list[Names | None]:
        """The names of samples, by their lines in the journal."""
        return [
            names
            for place, those in groupby(refs, lambda ref: ref.place)
            for names in self._of_one(place, those)
        ]

    def _of_one(self, place: LineLocation, refs: Iterable[SampleRef]) -> Iterator[Names | None]:
        """The names of samples of one exchange."""
        exchange = self._read(place)
        messages = exchange.messages
        texts = {} if messages is None else text_by_choice(exchange)
        for ref in refs:
            text = texts.get(ref.choice)
            yield None if text is None or messages is None else parsed_fields.names(messages, text)

    def of(self, name: str) -> list[SampleRef]:
        """The samples with this name, in the order of the answers."""
        return [*self._samples.get(name, {}).values()]

    def may_be_written(self, exact: str, parsed: str) -> bool:
        """Whether no sample is this text, or the newest one that is was parsed to these values."""
        newest = next(reversed(self._samples.get(exact, {})), None)
        return newest is None or parsed in self._names[newest].all

    def of_part(self, names: Names) -> list[SampleRef]:
        """The samples with this answer, or piece of one, to a question that has these inputs and more.

        Samples with exactly this text come last.
        """
        found = [ref for ref in self.of(names.raw) if self._names[ref.id].inputs > names.inputs]
        return sorted(found, key=lambda ref: self._names[ref.id].raw == names.raw)
