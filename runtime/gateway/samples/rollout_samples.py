"""`GET /slipway/rollouts/{rollout}/samples`: what a rollout sampled, and whether it can be trained.

Neighbours: gateway.py mounts it, with receipts.py's route beside it; samples.py knows them. Who rewards a
conversation by the names of its answers has them from here, who wonders why nothing was trained the reason.
"""

from __future__ import annotations

from fastapi import APIRouter

from runtime.gateway.samples.receipts import receipt_routes
from runtime.gateway.samples.sample_ref import SampleRef
from runtime.gateway.samples.samples import SampleStore
from runtime.shared.schema import Body


class RolloutSample(Body):
    """`received`: its answer is known to have reached its client, as it is at the next step at the latest.

    `unscorable`: why it cannot be trained.
    """

    sample: str
    version: int
    predictor: str | None
    purpose: str
    received: bool
    unscorable: str | None


def sample_routes(store: SampleStore) -> APIRouter:
    """The router of what is said of samples; of a rollout that nobody knows there are none."""
    router = receipt_routes(store)

    @router.get("/rollouts/{rollout:path}/samples")
    async def samples(rollout: str) -> list[RolloutSample]:
        received = {ref.id: ref for ref in store.of_rollout(rollout)}
        others = {ref.id: ref for ref in store.unreceived_of_rollout(rollout)}
        refs = sorted((others | received).values(), key=_place)
        return [_said(ref, ref.id in received) for ref in refs]

    return router


def _place(ref: SampleRef) -> tuple[int, int, int]:
    """The order of the answers."""
    return ref.place.file, ref.place.offset, ref.position


def _said(ref: SampleRef, received: bool) -> RolloutSample:
    return RolloutSample(
        sample=ref.id,
        version=ref.version,
        predictor=ref.tags.predictor,
        purpose=ref.tags.purpose,
        received=received,
        unscorable=ref.unscorable,
    )
