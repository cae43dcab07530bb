"""Finds the earlier answer that a chat request continues, and builds the engine's prompt from its exact ids.

A client that sends a conversation again with its answers unchanged goes on from them, in spite of any change
by the chat template. The engine gets the ids of the earlier turn as they were, then those that the template
adds (exact_prompt.py), and the turns are one sequence (samples/turns.py). If that is impossible, the request
is sent like any other, and the reason is recorded: a step counts it.
Neighbours: proxy.py asks once per request; samples/conversation_names.py has the names by which answers are
found; engine/last_turn_parsing.py is the engine's side. Never the reason why a request fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.engine.last_turn_parsing import LAST_TURN
from runtime.gateway.completions.exact_prompt import EarlierTurn, ExactPrompts, Ids, NotExactError
from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.requests import distribution
from runtime.gateway.samples import conversation_names
from runtime.gateway.samples.content_key import Call
from runtime.gateway.samples.conversation_names import NotConversationError, PrefixNames
from runtime.gateway.samples.journal import Conversation, Exchange, Sample
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.samples.turns import COMPLETE_REASONS, CUT_OFF

log = logging.getLogger(__name__)

TEXT_CHANGED = "text was changed by the client"
SYSTEM_CHANGED = "system prompt changed"
TOOLS_CHANGED = "tools changed"
TEMPLATE_CHANGED = "chat_template_kwargs changed"
SWITCHED_OFF = "switched off"
TOO_LONG = "too long for the context"
HELD_TO_GRAMMAR = "held to a grammar"
ONE_CALL = "calls after the first were left out"
NO_ENGINE_ANSWER = "the engine did not say"

# A request's settings for the template, beside messages and tools.
_TEMPLATE_SETTINGS = ("chat_template_kwargs", "documents", "reasoning_effort", "add_special_tokens")
# With one of them a prompt is no question that waits for the next answer, or not all of it.
_OTHER_PROMPTS = (
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("truncate_prompt_tokens", None),
)

# A request's settings that end an answer before the policy does.
_STOPS = ("stop", "stop_token_ids")


@dataclass(frozen=True)
class ChatTurn:
    """A chat request among others. `fields`: further fields for the engine, so that it goes on."""

    question: PrefixNames
    conversation: Conversation
    fields: dict[str, Any] | None = None

    def answered(self, text: str, calls: Iterable[Call]) -> str | None:
        """The name by which a later request finds this answer."""
        return conversation_names.name_with_answer(self.question, text, calls)

    def plainly(self, why: str) -> ChatTurn:
        """The same, asked as any other request."""
        return ChatTurn(self.question, replace(self.conversation, continues=None, apart=why, shown=None))


@dataclass(frozen=True)
class _Found:
    """An earlier answer, and how many messages its question had. `changed`: the conversation has a later
    answer, which its client did not send as it was given."""

    ref: SampleRef
    messages: int
    changed: bool = False


class PrefixContinuation:
    """Use it from the gateway's event loop."""

    def __init__(self, store: SampleStore, enabled: bool) -> None:
        self._store = store
        self._enabled = enabled
        self._exact = ExactPrompts()

    async def turn(
        self, request: ParsedRequest, body: dict[str, Any], client: EngineClient
    ) -> ChatTurn | None:
        """The turn that `request` continues; `body`: the engine's request without it. None: it is no chat."""
        if request.kind != "chat":
            return None
        messages = request.body["messages"]
        try:
            begun = conversation_names.prefix_names(request.tags, messages)
            tools = conversation_names.digest_of(request.body.get("tools") or [])
        except NotConversationError:
            return None
        turn = ChatTurn(begun[-1], Conversation(begun[-1].name, begun[-1].bare, tools))
        found = self._found(messages, begun)
        if isinstance(found, str):
            return turn.plainly(found)
        return turn if found is None else await self._after(found, turn, request, body, client)

    def _found(self, messages: list[Any], begun: list[PrefixNames]) -> _Found | str | None:
        """The latest answer that this conversation has as it was given, or why it has none of them."""
        index = self._store.turns
        answers = [place for place, message in enumerate(messages) if conversation_names.is_answer(message)]
        for place in reversed(answers):
            if (ref := index.answer(begun[place + 1].name)) is not None:
                later = (it for it in answers if it > place)
                return _Found(ref, place, any(index.was_prompt(begun[it].name) for it in later))
        if any(index.was_prompt(begun[place].name) for place in answers):
            return TEXT_CHANGED
        if any(index.was_prompt_otherwise(begun[place].bare) for place in answers):
            return SYSTEM_CHANGED
        return None

    async def _after(
        self,
        found: _Found,
        turn: ChatTurn,
        request: ParsedRequest,
        body: dict[str, Any],
        client: EngineClient,
    ) -> ChatTurn:
        try:
            exchange, sample = await asyncio.to_thread(self._store.load, found.ref)
            if why_not := self._why_not(request, turn, exchange, sample):
                # The end of an answer further back is no reason if a later one could have been continued.
                is_older = found.changed and why_not in (CUT_OFF, ONE_CALL)
                return turn.plainly(TEXT_CHANGED if is_older else why_not)
            earlier = _earlier_turn(request.body["messages"], found.messages, exchange, sample)
            prompt, plain = await self._exact.continue_from(client, body, earlier)
        except NotExactError as error:
            return turn.plainly(str(error))
        except (EngineError, OSError) as error:
            log.info("request %s: %s", request.id, error)
            return turn.plainly(NO_ENGINE_ANSWER)
        if prompt == plain:
            return replace(turn, conversation=replace(turn.conversation, continues=sample.id))
        if not _fits(len(prompt), len(plain), body, client):
            return turn.plainly(TOO_LONG)
        conversation = replace(
            turn.conversation,
            continues=sample.id,
            shown=conversation_names.digest_of(plain),
            shown_tokens=len(plain),
        )
        fields = {
            "kv_transfer_params": {"prompt_token_ids": prompt},
            LAST_TURN: len(earlier.prompt) + len(earlier.completion),
        }
        return ChatTurn(turn.question, conversation, fields)

    def _why_not(
        self, request: ParsedRequest, turn: ChatTurn, exchange: Exchange, sample: Sample
    ) -> str | None:
        """The reason a request cannot continue an earlier answer's ids, by the settings of both."""
        if not (self._enabled and request.allows_continuation):
            return SWITCHED_OFF
        if distribution.grammar(request.body):
            return HELD_TO_GRAMMAR  # vLLM looks for the end of a thought in all of the prompt's ids there
        if sample.finish_reason not in COMPLETE_REASONS or not sample.completion_ids:
            return CUT_OFF
        if sample.has_more_calls:  # the client has fewer calls than were sampled
            return ONE_CALL
        if exchange.conversation is None or exchange.conversation.tools != turn.conversation.tools:
            return TOOLS_CHANGED
        if any(exchange.settings.get(name) != request.body.get(name) for name in _TEMPLATE_SETTINGS):
            return TEMPLATE_CHANGED
        if any(request.body.get(name, usual) not in (usual, None) for name, usual in _OTHER_PROMPTS):
            return "another kind of prompt"
        return None


def _earlier_turn(messages: list[Any], place: int, exchange: Exchange, sample: Sample) -> EarlierTurn:
    """`place`: of the answer among the messages."""
    prompt = exchange.prompts[sample.prompt]
    conversation = exchange.conversation
    digest = conversation.shown if conversation and conversation.shown else None

    def was_shown(ids: Ids) -> bool:
        return ids == prompt if digest is None else conversation_names.digest_of(ids) == digest

    return EarlierTurn(
        prompt=prompt,
        completion=sample.completion_ids,
        messages=messages[:place],
        answer=messages[place],
        shown_tokens=conversation.shown_tokens if conversation and digest else len(prompt),
        shown=was_shown,
        has_stops=any(exchange.settings.get(name) for name in _STOPS),
    )


def _fits(prompt_tokens: int, plain_tokens: int, body: dict[str, Any], client: EngineClient) -> bool:
    """Whether a prompt leaves an answer the requested room.

    The engine's limit is the rest of its context, and the request's limit may be as long as that
    (answer_limit.py). If the plain prompt would not leave so much either, half of its rest is enough.
    """
    context = client.facts.context_length
    if context is None:
        return False
    left = context - plain_tokens
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    room = limit if isinstance(limit, int) and limit <= left else left // 2
    return prompt_tokens + max(room, 1) <= context
