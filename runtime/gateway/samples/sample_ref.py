"""A sample's id and its place in the journal: memory keeps nothing else of it.

Neighbours: samples.py makes them of the journal's lines; steps are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.gateway.samples.journal import LineLocation, Tags


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample's id and the facts that decide whether it can be trained on; its tokens are read when
    needed."""

    id: str
    tags: Tags
    version: int
    unscorable: str | None
    request: str
    place: LineLocation
    position: int
    # The client gave the text of it; see journal.Sample.
    retokenised: bool = False
    # Tells it from others of the same name by content; see content.around.
    around: str = ""

    @property
    def choice(self) -> int:
        """The index of its choice in the answer."""
        return int(self.id.rpartition(":")[2])
