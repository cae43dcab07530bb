"""A step of an ART client: its groups of trajectories and its keywords, once, to the published version.

The key of its step is the request's own id, which stays when the relay asks again: a lost answer makes no
second step. A step in which nothing can be trained is none, as it is none with ART: the client goes on, but
not for ever. Neighbours: routes.py hands over what bodies.py has read; members.py finds the samples, and the
queue of steps trains them. Knows nothing of HTTP but its errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from pydantic import ValidationError

from runtime.gateway.arbor.surroundings import Runtime
from runtime.gateway.art.bodies import Groups
from runtime.gateway.art.members import Members, OfContent, members_of
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import (
    KeyReusedError,
    NothingToTrainError,
    QueueFullError,
    RewoundError,
    SettingsRefusedError,
)
from runtime.shared.schema import MOST_SAMPLES, StepRequest, StepSettings
from runtime.shared.statuses import StepCounts, StepStatus

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

    def __init__(self, runtime: Runtime, of_content: OfContent) -> None:
        self._runtime = runtime
        self._of_content = of_content
        self._untrained = 0
        self._said: set[str] = set()

    async def train(self, request: str, said: Groups, keywords: dict[str, Any]) -> list[dict[str, float]]:
        """One step; what ART's client reads of it, a line for each update. None where nothing was trained.

        `request`: its id. Raises ApiError for keywords that this run cannot follow, a step that failed, and a
        client that has had nothing to train for too long.
        """
        key = f"art:{request}"
        settings = self._settings(keywords)
        members = Members([], said.raised)
        status = self._known(key)
        try:
            if status is None:
                members = self._members(said)
                if not members.groups:
                    raise NothingToTrainError(StepCounts(dropped=dict(members.dropped)))
                status = await self._submit(StepRequest(key=key, groups=members.groups, settings=settings))
        except NothingToTrainError as error:
            return self._in_vain(error, members)
        status = await self._ended(status)
        if status.state == "failed":
            raise ApiError(500, f"the training step failed: {status.error}", code="step_failed")
        self._untrained = 0
        if members.dropped:  # no step counts what never came to one
            log.info("step %d: left out before: %s", status.id, json.dumps(members.dropped))
        return [{"num_gradient_steps": 1.0, **measured(status, members)}]

    def _members(self, said: Groups) -> Members:
        try:
            return members_of(said, self._of_content, self._runtime.steps.has)
        except ValidationError as error:
            raise ApiError(
                400,
                f"a trajectory has {MOST_SAMPLES} answers at most, each by the name that came with it",
                param="trajectory_groups",
            ) from error

    def _known(self, key: str) -> StepStatus | None:
        return next((status for status in self._runtime.steps.list() if status.key == key), None)

    def _settings(self, keywords: dict[str, Any]) -> StepSettings | None:
        meant = self._runtime.meaning(keywords)
        if meant.refusals:
            raise refused(meant.refusals)
        for note in meant.notes:
            if note not in self._said and len(self._said) < 1000:
                self._said.add(note)
                log.warning("%s", note)
        return meant.settings if meant.settings != StepSettings() else None

    async def _submit(self, request: StepRequest) -> StepStatus:
        steps = self._runtime.steps
        while True:
            try:
                return await steps.submit(request)
            except QueueFullError as error:  # nothing is lost by waiting
                log.warning("an ART client's step waits: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
                self._check_alive()
            except SettingsRefusedError as error:
                raise ApiError(400, str(error), param=error.key, code="settings") from error
            except KeyReusedError:  # taken in by the same request, whose connection was lost
                if (known := self._known(request.key)) is None:
                    raise
                return known
            except RewoundError as error:
                raise ApiError(409, str(error), code="rewound") from error
            except OSError as error:
                raise ApiError(503, f"the machine's disk does not take it: {error.strerror}") from error

    async def _ended(self, status: StepStatus) -> StepStatus:
        while status.state not in ("published", "failed"):
            status = await self._runtime.steps.wait(status.id, _WAIT_SECONDS)
            self._check_alive()
        return status

    def _check_alive(self) -> None:
        """What waits for a step waits no longer than there is a runtime that could train it."""
        phase, detail = self._runtime.phase()
        if phase in ("failed", "stopping"):
            raise ApiError(503, f"the runtime is {phase}: {detail or 'see its log'}", code="not_ready")

    def _in_vain(self, error: NothingToTrainError, members: Members) -> list[dict[str, float]]:
        self._untrained += 1
        left_out = members.dropped if members.groups else None
        why = f"{error}; left out before: {json.dumps(left_out)}" if left_out else str(error)
        log.warning("nothing of an ART client's step can be trained: %s", why)
        if self._untrained >= MOST_UNTRAINED:
            message = f"nothing could be trained {self._untrained} times in a row: {why}"
            raise ApiError(422, message, code="nothing_to_train") from error
        return []


def measured(status: StepStatus, members: Members) -> dict[str, float]:
    """What a client shows of its step: the trainer's numbers, and what became of the trajectories."""
    counts = status.counts
    found = {name: float(value) for name, value in status.metrics.items()}
    found |= {"samples_trained": float(counts.trained), "step": float(status.id)}
    left_out = sum(counts.dropped.values()) + sum(members.dropped.values())
    return found | ({"samples_left_out": float(left_out)} if left_out else {})


def refused(refusals: list[dict[str, str]]) -> ApiError:
    """400, with each keyword and the way to have it."""
    words = "; ".join(f"{one['key']}: {one['why']}" for one in refusals[:_REASONS])
    options = " ".join(one["launch"] for one in refusals if one.get("launch"))
    way = f". A run that has them starts with: launch --art {options}" if options else ""
    return ApiError(
        400, words + way, param=refusals[0]["key"], code="settings_refused", details={"refusals": refusals}
    )
