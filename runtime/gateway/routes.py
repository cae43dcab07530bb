"""The training routes under `/slipway`: status, lease, steps, checkpoints, metrics.

Neighbours: gateway.py mounts them; runtime.gateway.steps.queue does the work. Speaks pydantic bodies
(schema.py); none of this is on the hot path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query

from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import (
    ClientStateTooLargeError,
    KeyReusedError,
    NothingToTrainError,
    QueueFullError,
    RewoundError,
    SettingsRefusedError,
    UnknownCheckpointError,
    UnknownStepError,
)
from runtime.gateway.status_reader import StatusReader
from runtime.gateway.steps.queue import StepQueue
from runtime.shared.schema import RestoreRequest, StepRequest
from runtime.shared.statuses import CheckpointInfo, RuntimeStatus, StepStatus

T = TypeVar("T")

WAIT_SECONDS = 60.0
METRICS_LINES = 10_000


def slipway_routes(
    steps: StepQueue, status_reader: StatusReader, metrics_path: Path, checkpoint: Callable[[str], str]
) -> APIRouter:
    """The router; every route answers one of statuses.py's bodies.

    `checkpoint`: the name of the checkpoint behind a version's name, so that both name it.
    """
    router = APIRouter(prefix="/slipway")

    @router.get("/status")
    async def status() -> RuntimeStatus:
        return status_reader.status(steps)

    @router.put("/lease")
    async def lease() -> dict[str, float]:
        return {"lease_left_seconds": status_reader.supervisor_status.renew_lease()}

    @router.post("/steps", status_code=202)
    async def post_step(request: StepRequest) -> StepStatus:
        return await _answered(steps.submit(request))

    @router.get("/steps")
    async def list_steps() -> Sequence[StepStatus]:
        return steps.list()

    @router.get("/steps/{step}")
    async def get_step(
        step: int,
        wait: Annotated[float, Query(ge=0)] = 0.0,
        until: Literal["ended", "committed"] = "ended",
    ) -> StepStatus:
        return await _answered(steps.wait(step, min(wait, WAIT_SECONDS), until == "committed"))

    @router.get("/checkpoints")
    async def checkpoints() -> Sequence[CheckpointInfo]:
        return await asyncio.to_thread(steps.checkpoints.list)

    @router.post("/checkpoints/{name}/pin")
    async def pin(
        name: str, best_of: Annotated[str | None, Query(pattern=r"^[\w.-]{1,64}$")] = None
    ) -> CheckpointInfo:
        return await _answered(steps.pin(checkpoint(name), best_of))

    @router.post("/checkpoints/{name}/restore", status_code=202)
    async def restore(name: str, request: RestoreRequest) -> StepStatus:
        return await _answered(steps.restore(checkpoint(name), request.key, request.client_state))

    @router.get("/metrics")
    async def metrics(after: Annotated[int, Query(ge=0)] = 0) -> list[dict[str, Any]]:
        return await asyncio.to_thread(_metrics, metrics_path, after, steps.last_line)

    return router


async def _answered(work: Awaitable[T]) -> T:
    """Await the queue's answer; its errors become HTTP's."""
    try:
        return await work
    except KeyReusedError as error:
        raise ApiError(409, str(error), param="key", code="key_reused") from error
    except SettingsRefusedError as error:
        raise ApiError(400, str(error), param=f"settings.{error.key}", code="settings") from error
    except ClientStateTooLargeError as error:
        raise ApiError(413, str(error), param="client_state") from error
    except QueueFullError as error:
        raise ApiError(429, str(error), code="queue_full", retry_after_seconds=5) from error
    except NothingToTrainError as error:
        details = {"counts": error.counts.model_dump()}
        raise ApiError(422, str(error), param="groups", code="nothing_to_train", details=details) from error
    except RewoundError as error:
        place = {"step": error.step, "client_state": error.client_state, "lost_at": error.lost_at}
        raise ApiError(409, str(error), code="rewound", details=place) from error
    except (UnknownStepError, UnknownCheckpointError) as error:
        raise ApiError(404, str(error), code="not_found") from error
    except OSError as error:
        message = f"the machine's disk cannot store it: {error.strerror or error}"
        raise ApiError(503, message, code="disk", retry_after_seconds=5) from error


def _metrics(path: Path, after: int, newest: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The lines after a step, with `newest` even while the trainer, having committed, has yet to log it."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    found = []
    for line in lines[-METRICS_LINES:]:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the trainer is writing it
        if row.get("step", 0) > after:
            found.append(row)
    if newest is not None and newest["step"] > max(after, *(row["step"] for row in found), 0):
        found.append(newest)
    return found
