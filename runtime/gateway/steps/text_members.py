"""Finds the samples of members given as text, by clients that cannot tag.

A member's messages and completion are looked up among the answers that were served without a tag. A text that
was never served here is trained from its text all the same, as far as that can be exact: the engine renders
and tokenises it, and its logprobs under the served version replace the unknown sampler's. Such a sample is
marked `retokenised`, and counted.
Neighbours: queue.py asks once, when a step is taken in; matching.py finds served answers; the samples made
here go into the journal like any other, so that the step finds them again.
"""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec

from runtime.gateway.engines.engine_client import EngineError
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.samples import content_key
from runtime.gateway.samples.journal import Exchange, Sample, Tags
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore, why_not_trainable
from runtime.gateway.steps.matching import Taken, match
from runtime.gateway.steps.rendering import NotRenderedError, render
from runtime.gateway.versions.versions import Versions
from runtime.shared.schema import Group, Member

# Texts the engine works on at a time, beside the rollouts.
_AT_ONCE = 8
# The assumed temperature of a text, because the client gives none.
_TEMPERATURE = 1.0

_NOT_TEXT = dict.fromkeys(("messages", "completion", "tool_calls"))


class TextMembers:
    """Makes members given by content into members given by sample."""

    def __init__(self, store: SampleStore, pool: EnginePool, versions: Versions) -> None:
        self._store = store
        self._pool = pool
        self._versions = versions
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, groups: list[Group], taken: Taken) -> list[Group]:
        """The same groups, their members naming rollouts or samples; a member without a match gets a
        failure."""
        if not any(member.messages is not None for group in groups for member in group.members):
            return groups
        members = [member for group in groups for member in group.members]
        # Served answers are matched before anything is made from text.
        matched = await match(members, self._store, taken)
        resolved = iter(await asyncio.gather(*map(self._resolved, members, matched)))
        return [
            group.model_copy(update={"members": [next(resolved) for _ in group.members]}) for group in groups
        ]

    async def _resolved(self, member: Member, ref: SampleRef | None) -> Member:
        if member.messages is None:
            return member
        if ref is None and member.reward is not None:
            try:
                if member.tool_calls is not None:
                    raise NotRenderedError("it calls tools, and no answer served here does so")
                async with self._places:
                    ref = await self._from_text(member.messages, member.completion or "")
            except (NotRenderedError, EngineError, ApiError) as error:
                return member.model_copy(update={"reward": None, "failure": f"text not trainable: {error}"})
        if ref is None:
            return member
        return member.model_copy(update=_NOT_TEXT | {"sample": ref.id})

    async def _from_text(self, messages: list[dict[str, object]], answer: str) -> SampleRef:
        served = self._versions.newest
        self._versions.acquire(served.version)
        try:
            engine = await self._pool.pick()
            prompt_ids, completion_ids = await render(engine.client, messages, answer)
            scored = await engine.client.score(served.engine_model, prompt_ids + completion_ids)
        finally:
            self._versions.release(served.version)
        logprobs: list[float | None] = [*scored[len(prompt_ids) :]]
        request, name = f"text-{uuid.uuid4().hex}", content_key.key(messages, answer)
        sample = Sample(
            id=f"{request}:0",
            prompt=0,
            completion_ids=completion_ids,
            logprobs=logprobs,
            finish_reason="stop",
            unscorable=why_not_trainable({}, completion_ids, logprobs),
            content=name,
            retokenised=True,
        )
        self._store.record(
            Exchange(
                request=request,
                digest="",
                created=time.time(),
                tags=Tags(),
                model=served.name,
                version=served.version,
                temperature=_TEMPERATURE,
                settings={},
                prompts=[prompt_ids],
                samples=[sample],
                streamed=False,
                answer=msgspec.Raw(b"null"),
                delivered=True,
            )
        )
        return self._store.of_sample(sample.id)[0]
