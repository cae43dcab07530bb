"""A step of an ART client: its groups of trajectories and its keywords, once, to the published version.

The key of its step is made of what it trains, so the same groups again, as after a lost answer, are the same
step. A step in which nothing can be trained is none, as it is none with ART: the client goes on, but not for
ever. Neighbours: routes.py hands over what bodies.py has read; the queue of steps trains it. Knows nothing of
HTTP but its errors.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

from runtime.gateway.arbor.surroundings import Runtime
from runtime.gateway.art.bodies import Groups
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import (
    KeyReusedError,
    NothingToTrainError,
    QueueFullError,
    RewoundError,
    SettingsRefusedError,
)
from runtime.shared.schema import StepRequest, StepSettings, StepStatus

log = logging.getLogger(__name__)

# A client that has nothing to train so often in a row has something wrong with it.
MOST_UNTRAINED = 8
# A queue that is full is asked again so often.
AGAIN_SECONDS = 2.0
_WAIT_SECONDS = 30.0
# Of a reason phrase.
_REASONS = 5


class Training:
    """The steps of all clients. The gateway's event loop is its only user."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._untrained = 0
        self._said: set[str] = set()

    async def train(self, groups: Groups, keywords: dict[str, Any]) -> list[dict[str, float]]:
        """One step; what ART's client reads of it, a line for each update. None where nothing was trained.

        Raises ApiError for keywords that this run cannot follow, a step that failed, and a client that has
        had nothing to train for too long.
        """
        settings = self._settings(keywords)
        try:
            if not groups.groups:
                raise _nothing(groups)
            status = await self._submit(groups, settings)
        except NothingToTrainError as error:
            return self._in_vain(error, groups)
        status = await self._ended(status)
        if status.state == "failed":
            raise ApiError(500, f"the training step failed: {status.error}", code="step_failed")
        self._untrained = 0
        return [{"num_gradient_steps": 1.0, **measured(status, groups)}]

    def _settings(self, keywords: dict[str, Any]) -> StepSettings | None:
        meant = self._runtime.meaning(keywords)
        if meant.refusals:
            raise refused(meant.refusals)
        for note in meant.notes:
            if note not in self._said and len(self._said) < 1000:
                self._said.add(note)
                log.warning("%s", note)
        return meant.settings if meant.settings != StepSettings() else None

    async def _submit(self, groups: Groups, settings: StepSettings | None) -> StepStatus:
        said = settings.model_dump_json(exclude_none=True) if settings else ""
        digest = hashlib.sha256(f"{groups.digest}{said}".encode()).hexdigest()[:32]
        request = StepRequest(key=f"art:{digest}", groups=groups.groups, settings=settings)
        steps = self._runtime.steps
        while True:
            try:
                return await steps.submit(request)
            except QueueFullError as error:  # nothing is lost by waiting
                log.warning("an ART client's step waits: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
            except SettingsRefusedError as error:
                raise ApiError(400, str(error), param=error.key, code="settings") from error
            except (KeyReusedError, RewoundError) as error:
                code = "rewound" if isinstance(error, RewoundError) else "key_reused"
                raise ApiError(409, str(error), code=code) from error
            except OSError as error:
                raise ApiError(503, f"the machine's disk does not take it: {error.strerror}") from error

    async def _ended(self, status: StepStatus) -> StepStatus:
        while status.state not in ("published", "failed"):
            status = await self._runtime.steps.wait(status.id, _WAIT_SECONDS)
            phase, detail = self._runtime.phase()
            if phase in ("failed", "stopping"):
                raise ApiError(503, f"the runtime is {phase}: {detail or 'see its log'}", code="not_ready")
        return status

    def _in_vain(self, error: NothingToTrainError, groups: Groups) -> list[dict[str, float]]:
        self._untrained += 1
        why = f"{error}; left out before: {json.dumps(groups.dropped)}" if groups.dropped else str(error)
        log.warning("nothing of an ART client's step can be trained: %s", why)
        if self._untrained >= MOST_UNTRAINED:
            message = f"nothing could be trained {self._untrained} times in a row: {why}"
            raise ApiError(422, message, code="nothing_to_train") from error
        return []


def measured(status: StepStatus, groups: Groups) -> dict[str, float]:
    """What a client shows of its step: the trainer's numbers, and what became of the trajectories."""
    counts = status.counts
    found = {name: float(value) for name, value in status.metrics.items()}
    found |= {"samples_trained": float(counts.trained), "step": float(status.id)}
    left_out = sum(counts.dropped.values()) + sum(groups.dropped.values())
    return found | ({"samples_left_out": float(left_out)} if left_out else {})


def refused(refusals: list[dict[str, str]]) -> ApiError:
    """400, with each keyword and the way to have it."""
    words = "; ".join(f"{one['key']}: {one['why']}" for one in refusals[:_REASONS])
    options = " ".join(one["launch"] for one in refusals if one.get("launch"))
    way = f". A run that has them starts with: launch --art {options}" if options else ""
    return ApiError(
        400, words + way, param=refusals[0]["key"], code="settings_refused", details={"refusals": refusals}
    )


def _nothing(groups: Groups) -> NothingToTrainError:
    from runtime.shared.schema import StepCounts

    return NothingToTrainError(StepCounts(dropped=dict(groups.dropped)))
