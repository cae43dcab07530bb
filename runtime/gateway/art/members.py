"""Which samples the choices of ART's trajectories are: each trajectory is one member, each sample its once.

A choice says itself which sample it is (`slipway`). But in its `gather` the client of release 0.4 asks for a
stream and keeps of it no more than the text; such a choice is looked up by what was said, literally: the
conversation before it and its own words, among the answers that were served. What is not found was another
model's, and is counted: never is a text trained that was not sampled here. Neighbours: bodies.py reads the
trajectories, the store of samples knows what was served. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.gateway.art.bodies import Choice, Groups, Trajectory
from runtime.gateway.samples import content
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.shared.schema import Group, Member

# As `launcher/client/trajectories/members.py` says it of the same.
OTHERS = "answer of another model"
EMPTY = "no answer in its trajectory"
TWICE = "named twice"
_NO_REWARD = "no reward"

# The samples of a name by content.
OfContent = Callable[[str], list[SampleRef]]
Taken = Callable[[str], bool]


@dataclass
class Members:
    """The groups to train, and what is left out of them, by reason."""

    groups: list[Group]
    dropped: Counter[str]


def members_of(said: Groups, of_content: OfContent, taken: Taken) -> Members:
    """Those of groups as they were sent. `taken`: whether a step has a sample already."""
    finding = _Finding(of_content, taken, dropped=Counter(said.raised))
    everybody = [trajectory for group in said.groups for trajectory in group]
    finding.given.update(one.sample for it in everybody for one in it.choices if one.sample is not None)
    groups = []
    for number, trajectories in enumerate(said.groups):
        members = [member for it in trajectories if (member := finding.member(it)) is not None]
        groups += [Group(id=str(number), members=members)] if members else []
    return Members(groups, finding.dropped)


@dataclass
class _Finding:
    of_content: OfContent
    taken: Taken
    dropped: Counter[str]
    given: set[str] = field(default_factory=set)

    def member(self, trajectory: Trajectory) -> Member | None:
        samples: dict[str, None] = {}
        for choice in trajectory.choices:
            sample = choice.sample or self._by_words(choice)
            if sample is None:
                self.dropped[OTHERS] += 1
            elif sample in samples:
                self.dropped[TWICE] += 1
            else:
                samples[sample] = None
        if not trajectory.choices:
            self.dropped[EMPTY] += 1
        if not samples:
            return None
        failure = _NO_REWARD if trajectory.reward is None else None
        return Member(samples=[*samples], reward=trajectory.reward, failure=failure)

    def _by_words(self, choice: Choice) -> str | None:
        """The newest sample of these words that nobody has; where all are spoken for, the newest there is.

        Of several, what has the very white space around them, and then what can be trained on.
        """
        found = [ref for key in _keys(choice) for ref in self.of_content(key)]
        free = [ref for ref in found if ref.id not in self.given and ref.tags.purpose == "train"]
        if not free:
            return None
        around = content.around(_words(choice))

        def fitness(ref: SampleRef) -> tuple[bool, bool, bool]:
            return not self.taken(ref.id), ref.around == around, ref.unscorable is None

        best = sorted(free, key=fitness)[-1]
        self.given.add(best.id)
        return best.id


def _keys(choice: Choice) -> Iterator[str]:
    """The names it may have: clients give an answer without words back as none, or as empty ones."""
    words, calls = _words(choice), content.calls_of(choice.message.get("tool_calls"))
    as_kept = [_as_message(one) for one in choice.before]
    spelled = [{**one, "content": one.get("content") or ""} for one in as_kept]
    keys = (content.key(before, words, calls) for before in (as_kept, spelled))
    yield from dict.fromkeys(keys)


def _words(choice: Choice) -> str:
    return str(choice.message.get("content") or "")


def _as_message(said: dict[str, Any]) -> dict[str, Any]:
    """An answer in a history as the client sends it back: without what no request has."""
    return {name: value for name, value in said.items() if value not in (None, [], {})}
