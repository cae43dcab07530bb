"""`POST /slipway/receipts`: the relay reports which answers reached their clients.

Neighbours: gateway.py mounts it; samples.py stores the reports; launcher/proxy/relay_receipts.py sends it.
The sender of a request with `x-slipway-receipt: follows` reports here whether the answer arrived: until then
the answer is recorded, and no sample (C52).
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.samples.samples import SampleStore
from runtime.shared.schema import MOST_RECEIPTS, Body


class Receipt(Body):
    """`received`: the whole answer reached the client; `doubtful`: it did, and then its connection broke."""

    request: str
    state: Literal["received", "doubtful"]


class Receipts(Body):
    """Receipts in the order in which they came to be. Unknown ids are passed over."""

    receipts: list[Receipt] = Field(max_length=MOST_RECEIPTS)


def receipt_routes(store: SampleStore) -> APIRouter:
    """The router of the one route."""
    router = APIRouter(prefix="/slipway")

    @router.post("/receipts", status_code=204)
    async def take(given: Receipts) -> Response:
        try:
            for receipt in given.receipts:
                keep = store.mark_received if receipt.state == "received" else store.mark_uncertain
                keep(receipt.request)
        except OSError as error:  # a full disk: they are sent again
            message = f"the machine's disk cannot store it: {error.strerror or error}"
            raise ApiError(503, message, code="disk", retry_after_seconds=5) from error
        return Response(status_code=204)

    return router
