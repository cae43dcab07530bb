"""The prompt of a later turn: the earlier turn's ids as they were, then the chat template's additions.

The added ids come from the template's own rendering of the conversation with a placeholder instead of the
real answer: they are the ids after the token that ends the placeholder. The end of an answer is read once per
kind of answer, from a conversation of two messages. Every step is checked. If a check fails, the turn is sent
as if there had been no other.
Neighbours: prefix_continuation.py finds the earlier turn; the engine has template and tokenizer. Knows
nothing of samples.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.gateway.engines.engine_client import EngineClient

Body = dict[str, Any]
Ids = list[int]

REWRITTEN = "the template shows it otherwise"
MOVED = "the template's own text changed"
UNENDED = "the template does not end an answer as it ended"

# Two answers without a common word, which no model gives.
_PLACEHOLDERS = ("quartz is what stands in here", "Zebras took this place for once")
_QUESTION = {"role": "user", "content": "a"}
_MAX_CLOSINGS = 256


class NotExactError(Exception):
    """The template's text after the earlier turn cannot be proven; the message is the reason."""


@dataclass(frozen=True)
class EarlierTurn:
    """The turn to continue: its ids, and the request for it in its present form.

    `shown`: whether these are the first ids that the template made of it then. `has_stops`: whether it may
    have ended at a text or a token that its client named.
    """

    prompt: Ids
    completion: Ids
    messages: Sequence[Any]
    answer: Mapping[str, Any]
    shown_tokens: int
    shown: Any
    has_stops: bool = False


@dataclass(frozen=True)
class _Closing:
    """How the template ends an answer: the ids of the stand-in, and those up to the one that ends it."""

    placeholder: Ids
    end: Ids


class ExactPrompts:
    """Makes prompts that go on from earlier turns. Use it from one event loop."""

    def __init__(self) -> None:
        self._closings: OrderedDict[str, _Closing] = OrderedDict()

    async def continue_from(self, client: EngineClient, body: Body, earlier: EarlierTurn) -> tuple[Ids, Ids]:
        """The prompt that goes on from `earlier`, and the one that the template alone makes of `body`.

        They are the same if the template shows the earlier turn as it was. Raises EngineError, and
        NotExactError.
        """
        so_far = earlier.prompt + earlier.completion
        plain = await client.render(body)
        if plain[: len(so_far)] == so_far:
            return plain, plain
        added = await self._added(client, body, earlier, plain)
        return so_far + added, plain

    async def _added(self, client: EngineClient, body: Body, earlier: EarlierTurn, plain: Ids) -> Ids:
        """The template's text after the earlier answer, for a conversation that goes on."""
        answer, messages = _placeholder_answer(earlier.answer, _PLACEHOLDERS[0]), list(earlier.messages)
        later = body["messages"][len(messages) + 1 :]
        shown = await client.render(body | {"messages": [*messages, answer, *later]})
        await self._check_head(client, body, earlier, plain, shown)
        closing = await self._closing(client, body, earlier)
        # A line's end that stopped an answer is not the one that the template writes behind its last token.
        if earlier.has_stops and earlier.completion[-len(closing.end) :] != closing.end:
            raise NotExactError(UNENDED)
        mark = closing.placeholder + closing.end
        places = _places(mark, shown)
        if len(places) != 1:
            raise NotExactError(REWRITTEN)
        added = shown[places[0] + len(mark) :]
        if not added or plain[-len(added) :] != added:
            raise NotExactError(REWRITTEN)
        return added

    async def _check_head(
        self, client: EngineClient, body: Body, earlier: EarlierTurn, plain: Ids, shown: Ids
    ) -> None:
        """The template must still show the earlier question as it did when it was asked."""
        if any(earlier.shown(ids[: earlier.shown_tokens]) for ids in (plain, shown)):
            return
        question = await client.render(body | {"messages": list(earlier.messages)})
        if not earlier.shown(question):
            raise NotExactError(MOVED)

    async def _closing(self, client: EngineClient, body: Body, earlier: EarlierTurn) -> _Closing:
        """How an answer of this kind ends, with the token that ended the earlier one."""
        last = earlier.completion[-1]
        answers = [_placeholder_answer(earlier.answer, text) for text in _PLACEHOLDERS]
        kept = {name: value for name, value in body.items() if name != "messages"}
        key_json = json.dumps([client.name, last, answers[0], kept], sort_keys=True)
        kind = hashlib.sha256(key_json.encode()).hexdigest()  # a request's tools may be of any size
        if (known := self._closings.get(kind)) is not None:
            return known
        first, second = [
            await client.render(body | {"messages": [_QUESTION, answer], "add_generation_prompt": False})
            for answer in answers
        ]
        closing = _closing_of(first, second, last)
        self._closings[kind] = closing
        if len(self._closings) > _MAX_CLOSINGS:
            self._closings.popitem(last=False)
        return closing


def _closing_of(first: Ids, second: Ids, last: int) -> _Closing:
    """The answer is the part where two conversations differ; the common part after it ends it."""
    head = _common_prefix(first, second)
    tail = _common_prefix(first[::-1], second[::-1])
    stand_in, end = first[head : len(first) - tail], first[len(first) - tail :]
    if len(first) == len(second) == head or not stand_in or last not in end or last in stand_in:
        raise NotExactError(UNENDED)
    # Its first ids may be others after other text; where the rest stands only once, no other text is it.
    return _Closing(stand_in[len(stand_in) // 3 :], end[: end.index(last) + 1])


def _common_prefix(first: Ids, second: Ids) -> int:
    """How many ids both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _places(part: Ids, whole: Ids) -> list[int]:
    """Where a part stands in the whole."""
    begins = range(len(whole) - len(part) + 1)
    return [place for place in begins if whole[place] == part[0] and whole[place : place + len(part)] == part]


def _placeholder_answer(answer: Mapping[str, Any], text: str) -> Body:
    """Another answer of the same kind: another text, or other arguments of the last of its calls."""
    calls = answer.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": text}
    others = [_call(call, {}) for call in calls[:-1]]
    content = answer.get("content")
    return {
        "role": "assistant",
        "content": "a" if content else content,
        "tool_calls": [*others, _call(calls[-1], {"a": text})],
    }


def _call(call: Mapping[str, Any], arguments: Mapping[str, str]) -> Body:
    function = {"name": call["function"]["name"], "arguments": json.dumps(arguments)}
    return {"id": call.get("id"), "type": "function", "function": function}
