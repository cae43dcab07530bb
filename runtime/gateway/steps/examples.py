"""Makes examples into ids: each answer of a conversation, right after its own prompt as it is served (C53).

An answer is every assistant's message whose `weight` is not 0. If the next answer's prompt goes on from the
last answer id for id, they are one sequence; else each is a sequence of its own. An example that cannot be
rendered exactly is dropped whole, and its answers are counted with the reason.
Neighbours: handover.py asks when a supervised step's turn comes; rendering.py has one answer's ids,
sft_batch.py writes the batch. Knows nothing of losses.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests import tools
from runtime.gateway.steps.rendering import TOO_LONG, Message, NotRenderedError, Tools, render
from runtime.shared.schema import SupervisedExample
from runtime.shared.statuses import StepCounts

T = TypeVar("T")

MAX_ANSWERS = 256
# Answers the engines render at a time, beside the rollouts.
_AT_ONCE = 8
# An engine that dies meanwhile is started again; how often an answer is asked for again, and for how long an
# engine may be away, as while a runtime starts anew.
_TRIES = 5
_ENGINES_SECONDS = 1800.0
_POLL_SECONDS = 1.0


class NotTokenisedError(Exception):
    """No engine renders the examples; the message is the reason."""


@dataclass(frozen=True)
class TokenisedExample:
    """One sequence to learn from: its ids, and the spans of the answers in it (start, end)."""

    example: int
    tokens: list[int]
    answers: list[tuple[int, int]]


@dataclass
class TokenisedExamples:
    """The tokenised examples of a step, and their counts."""

    sequences: list[TokenisedExample] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)


Render = Callable[[Sequence[SupervisedExample]], Awaitable[TokenisedExamples]]


def answer_places(example: SupervisedExample) -> list[int]:
    """The places of the trained answers among an example's messages."""
    return [
        place
        for place, message in enumerate(example.messages)
        if message.get("role") == "assistant" and message.get("weight", 1) != 0
    ]


def counted(examples: Sequence[SupervisedExample]) -> StepCounts:
    """The counts of examples that are not rendered yet."""
    without = sum(not answer_places(example) for example in examples)
    dropped = {"no answer to learn": without} if without else {}
    return StepCounts(samples=sum(len(answer_places(example)) for example in examples), dropped=dropped)


class Examples:
    """Renders examples by whichever engine has the least to do."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def tokenise(self, examples: Sequence[SupervisedExample]) -> TokenisedExamples:
        """All of a step's examples, in their order. Raises NotTokenisedError."""
        rendered = await _all([self._sequences(number, one) for number, one in enumerate(examples)])
        found, dropped = TokenisedExamples(), Counter(counted(examples).dropped)
        for example, sequences in zip(examples, rendered, strict=True):
            if isinstance(sequences, str):
                dropped[sequences] += len(answer_places(example))
            else:
                found.sequences += sequences
        answers = sum(len(one.answers) for one in found.sequences)
        found.counts = counted(examples).model_copy(
            update={
                "trained": answers,
                "turns_joined": answers - len(found.sequences),
                "learned_tokens": sum(end - start for one in found.sequences for start, end in one.answers),
                "dropped": dict(dropped),
            }
        )
        return found

    async def _sequences(self, number: int, example: SupervisedExample) -> list[TokenisedExample] | str:
        """An example's sequences, or why it has none."""
        places = answer_places(example)
        if len(places) > MAX_ANSWERS:
            return f"more than {MAX_ANSWERS} answers"
        given = tools.without_tool_grammar({"tools": example.tools})[0]["tools"]
        messages = [_shown(message) for message in example.messages]
        try:
            parts = await _all([self._answer(messages[:place], messages[place], given) for place in places])
        except NotRenderedError as error:
            return str(error)
        return _joined(number, parts)

    async def _answer(
        self, before: list[Message], answer: Message, given: Tools
    ) -> tuple[list[int], list[int]]:
        """Raises NotRenderedError, NotTokenisedError."""
        last_error: EngineError | None = None
        async with self._places:
            for _ in range(_TRIES):
                client = await self._client()
                try:
                    return await _fitting(client, before, answer, given)
                except EngineError as error:
                    last_error = error
                    if 400 <= error.status < 500:
                        raise NotRenderedError(_refusal(error)) from error
                    await asyncio.sleep(_POLL_SECONDS)
        raise NotTokenisedError(f"no engine renders the examples: {last_error}")

    async def _client(self) -> EngineClient:
        end = time.monotonic() + _ENGINES_SECONDS
        while True:
            try:
                return (await self._pool.pick()).client
            except ApiError as error:
                if error.code == "engine_failed" or time.monotonic() > end:
                    raise NotTokenisedError(f"no engine renders the examples: {error}") from error
                await asyncio.sleep(_POLL_SECONDS)


async def _fitting(
    client: EngineClient, before: list[Message], answer: Message, given: Tools
) -> tuple[list[int], list[int]]:
    prompt, completion = await render(client, before, answer, given)
    if len(prompt) + len(completion) > await client.context_length():
        raise NotRenderedError(TOO_LONG)
    if not prompt:
        raise NotRenderedError("it has no prompt")
    return prompt, completion


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Like asyncio.gather, but if one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _shown(message: Message) -> Message:
    """A message as the engine is to see it: the weight is ours."""
    return {name: value for name, value in message.items() if name != "weight"}


def _refusal(error: EngineError) -> str:
    """One reason for all messages of a kind: it becomes a key in the counts."""
    too_long = "maximum context length" in error.message or "maximum model length" in error.message
    return TOO_LONG if too_long else "the engine does not take its messages"


def _joined(number: int, parts: list[tuple[list[int], list[int]]]) -> list[TokenisedExample]:
    """Answers in their order, each that goes on from the last in one sequence with it."""
    found: list[TokenisedExample] = []
    for prompt, completion in parts:
        tokens, place = prompt + completion, (len(prompt), len(prompt) + len(completion))
        if found and prompt[: len(found[-1].tokens)] == found[-1].tokens:
            found[-1] = TokenisedExample(number, tokens, [*found[-1].answers, place])
        else:
            found.append(TokenisedExample(number, tokens, [place]))
    return found
