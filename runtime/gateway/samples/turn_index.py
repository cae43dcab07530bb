"""Finds an answer by the conversation that it ended (conversation_names.py), and knows the questions that
were asked.

Only the newest are kept: a request that goes on from an answer comes soon.
Neighbours: samples.py notes the journal's entries. The gateway's event loop is its only user.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from runtime.gateway.samples.journal import Conversation
from runtime.gateway.samples.sample_ref import SampleRef

REMEMBERED_TURNS = 1 << 16

Value = TypeVar("Value")


class TurnIndex:
    """Names → answers, the newest of each; and the names of questions."""

    def __init__(self, most: int = REMEMBERED_TURNS) -> None:
        self._most = most
        self._answers: OrderedDict[str, SampleRef] = OrderedDict()
        self._questions: OrderedDict[str, None] = OrderedDict()
        self._bare: OrderedDict[str, None] = OrderedDict()

    def note(self, conversation: Conversation, answers: Iterable[tuple[str | None, SampleRef]]) -> None:
        """A recorded exchange: its place, and its answers by their names."""
        self._put(self._questions, conversation.question, None)
        self._put(self._bare, conversation.bare, None)
        for name, ref in answers:
            if name is not None:
                self._put(self._answers, name, ref)

    def answer(self, name: str) -> SampleRef | None:
        """The newest answer that ended this conversation."""
        return self._answers.get(name)

    def was_prompt(self, name: str) -> bool:
        """Whether this conversation was the prompt of a recorded request."""
        return name in self._questions

    def was_prompt_otherwise(self, bare: str) -> bool:
        """Whether it was one, under any system prompt; `bare`: its name without system messages."""
        return bare in self._bare

    def _put(self, where: OrderedDict[str, Value], name: str, value: Value) -> None:
        where[name] = value
        where.move_to_end(name)
        if len(where) > self._most:
            where.popitem(last=False)
