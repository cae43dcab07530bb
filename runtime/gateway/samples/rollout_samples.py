"""`GET /slipway/rollouts/{rollout}/samples`: a rollout's samples, and whether they can be trained.

Neighbours: gateway.py mounts it, with receipts.py's route beside it; samples.py knows them. A client that
rewards a conversation gets the ids of its answers here, and the reason if one cannot be trained.
"""

from __future__ import annotations

from fastapi import APIRouter

from runtime.gateway.samples.receipts import receipt_routes
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.shared.schema import Body


class RolloutSample(Body):
    """`received`: its answer is known to have reached its client, as it is at the next step at the latest.
    `unscorable`: the reason it cannot be trained."""

    sample: str
    version: int
    predictor: str | None
    purpose: str
    received: bool
    unscorable: str | None


def sample_routes(store: SampleStore) -> APIRouter:
    """The router; an unknown rollout has no samples."""
    router = receipt_routes(store)

    @router.get("/rollouts/{rollout:path}/samples")
    async def samples(rollout: str) -> list[RolloutSample]:
        received = {ref.id: ref for ref in store.of_rollout(rollout)}
        others = {ref.id: ref for ref in store.unreceived_of_rollout(rollout)}
        refs = sorted((others | received).values(), key=_answer_order)
        return [_describe(ref, ref.id in received) for ref in refs]

    return router


def _answer_order(ref: SampleRef) -> tuple[int, int, int]:
    """The order of the answers."""
    return ref.place.file, ref.place.offset, ref.position


def _describe(ref: SampleRef, received: bool) -> RolloutSample:
    return RolloutSample(
        sample=ref.id,
        version=ref.version,
        predictor=ref.tags.predictor,
        purpose=ref.tags.purpose,
        received=received,
        unscorable=ref.unscorable,
    )
