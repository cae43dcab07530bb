"""The groups that DSPy's own GRPO hands a job, as the groups of one step of the run: each new one, once.

DSPy fills as many places as ids are listed: with copies of a step's groups and with an earlier step's
leftovers. It also fills a short group with copies of its own members. A copy is recognised because it is the
very same object; the same words may well have been sampled twice.
Neighbours: `reinforce_job.py` sends these groups. Knows nothing of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.client.request_bodies import Group, Member


@dataclass
class GroupDeduplicator:
    """Remembers the groups of the last two steps, which also keeps their objects alive for comparison."""

    copies: int = 0
    _recent: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=2))

    def new_groups(self, train_data: Sequence[Mapping[str, Any]], prefix: str) -> list[Group]:
        """The groups that were not sent before."""
        known = {id(it) for groups in self._recent for it in groups}
        groups, fresh = [], []
        for item in train_data:
            members = item["group"]
            if id(members) in known:
                self.copies += 1
                continue
            known.add(id(members))
            fresh.append(members)
            groups.append(Group(id=f"{prefix}/{item.get('batch_id')}", members=_members(members)))
        if fresh:
            self._recent.append(fresh)
        return groups


def _members(members: Iterable[Mapping[str, Any]]) -> list[Member]:
    once = {id(it): it for it in members}
    return [_member(it) for it in once.values()]


def _member(item: Mapping[str, Any]) -> Member:
    completion = item["completion"]
    text = completion["content"] if isinstance(completion, Mapping) else completion
    messages = [dict(it) for it in item["messages"]]
    return Member(messages=messages, completion=text, reward=float(item["reward"]))
