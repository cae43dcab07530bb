"""`POST /slipway/samples/lookup`: finds the samples of a conversation's answers by their text.

For a client whose library keeps only the text of an answer, as one of ART's does for LiteLLM. Each answer is
looked up literally among the served ones: the conversation before it and its own text. An answer that is not
found was another model's: a text that was not sampled here is never trained. Neighbours: gateway.py mounts
it; samples.py has the served answers, the client names the found samples in a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from fastapi import APIRouter
from pydantic import Field, NonNegativeInt, model_validator

from runtime.gateway.samples import content_key
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.shared.schema import MOST_SAMPLES, Answer, Body, SampleId

MAX_CONVERSATIONS = 4096

# The samples of a name by content; whether a step has a sample already.
OfContent = Callable[[str], list[SampleRef]]
Taken = Callable[[str], bool]


class LookupConversation(Body):
    """A conversation. `answers`: the places of the messages to look up."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    answers: Annotated[list[NonNegativeInt], Field(max_length=MOST_SAMPLES)]

    @model_validator(mode="after")
    def _has_its_answers(self) -> Self:
        if any(place >= len(self.messages) for place in self.answers):
            raise ValueError("an answer must be the place of a message")
        return self


class Lookup(Body):
    """The request. `named`: samples of other answers of the same step; none of these is found."""

    conversations: Annotated[list[LookupConversation], Field(max_length=MAX_CONVERSATIONS)]
    named: list[SampleId] = []


class Found(Answer):
    """The sample of each answer, by conversation; None if none has its words."""

    samples: list[list[str | None]]


def lookup_routes(of_content: OfContent, taken: Taken) -> APIRouter:
    """The router of the one route."""
    router = APIRouter(prefix="/slipway")

    @router.post("/samples/lookup")
    async def lookup(request: Lookup) -> Found:
        words = await asyncio.to_thread(lambda: [[*_answer_keys(one)] for one in request.conversations])
        supply = _UnclaimedSamples(of_content, taken, {*request.named})
        return Found(samples=[[supply.give(one) for one in answers] for answers in words])

    return router


@dataclass(frozen=True)
class _AnswerKeys:
    """The keys that an answer may have by content, and the white space around it."""

    keys: tuple[str, ...]
    around: str


def _answer_keys(conversation: LookupConversation) -> Iterator[_AnswerKeys]:
    # A client that sends an answer back leaves out fields that no request has.
    messages = [_without_empty_fields(one) for one in conversation.messages]
    for place in conversation.answers:
        text = str(conversation.messages[place].get("content") or "")
        calls = content_key.calls_of(conversation.messages[place].get("tool_calls"))
        before = messages[:place]
        # Clients give an answer without words back as none, or as empty ones.
        spelled = [{**one, "content": one.get("content") or ""} for one in before]
        keys = (content_key.key(it, text, calls) for it in (before, spelled))
        yield _AnswerKeys(tuple(dict.fromkeys(keys)), content_key.surrounding_whitespace(text))


def _without_empty_fields(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value not in (None, [], {})}


@dataclass
class _UnclaimedSamples:
    """Samples by their text; each is given out once."""

    of_content: OfContent
    taken: Taken
    given: set[str] = field(default_factory=set)

    def give(self, words: _AnswerKeys) -> str | None:
        """The newest unclaimed sample with this text; if all are claimed, the newest.

        Samples with the same surrounding white space come first, then those that can be trained on.
        """
        found = [ref for key in words.keys for ref in self.of_content(key)]
        free = [ref for ref in found if ref.id not in self.given and ref.tags.purpose == "train"]
        if not free:
            return None

        def fitness(ref: SampleRef) -> tuple[bool, bool, bool]:
            return not self.taken(ref.id), ref.around == words.around, ref.unscorable is None

        best = sorted(free, key=fitness)[-1]
        self.given.add(best.id)
        return best.id
