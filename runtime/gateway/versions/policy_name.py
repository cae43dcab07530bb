"""`POST /slipway/policy_name`: a program's own name for the policy, as programs for ART have one.

    art/models.json     {"policy": "agent-001"}

A run trains one policy, so there is one such name: a second one would be the same weights under another name,
and is refused. After that `agent-001` is the newest version and `agent-001@7` the version of step 7.
Neighbours: gateway.py mounts it; versions.py resolves names by it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.versions.versions import BASE, Versions
from runtime.shared import json_files
from runtime.shared.model_names import ModelNames
from runtime.shared.schema import Body

# The allowed names: a name is used as a model's, and `@` stands before a step.
_NAME = re.compile(r"[^\s@/\\\x00-\x1f][^@\\\x00-\x1f]{0,127}")
_STEP = re.compile(r"0|[1-9][0-9]{0,8}")


class PolicyNamed(Body):
    """The body: the name, and the model that its program wants trained."""

    name: str
    base_model: Annotated[str, Field(min_length=1, max_length=1024)]


class PolicyName:
    """The name of one run. The gateway's event loop is its only user."""

    def __init__(self, state_dir: Path, versions: Versions, alias: str, names: ModelNames) -> None:
        self._path = state_dir / "art" / "models.json"
        self._versions = versions
        self._alias = alias
        self._names = names
        self._own: str | None = (json_files.read_json(self._path) or {}).get("policy")

    def meaning(self, name: str) -> str | None:
        """The policy's own name for a program's name, `agent` or `agent@7`; None for any other."""
        model, at, step = name.partition("@")
        if model != self._own:
            return None
        if not at:
            return self._alias
        return self._versions.named(int(step)) if _STEP.fullmatch(step) else None

    def take(self, request: PolicyNamed) -> None:
        """Know the policy by this name. Raises ApiError for one that it cannot have, OSError."""
        if not _NAME.fullmatch(request.name) or request.name != request.name.strip():
            raise ApiError(400, "a model's name has 1 to 128 characters, and no '@' in it", param="name")
        if not self._names.has(request.base_model):
            raise ApiError(
                400,
                f"this run trains {self._names.own}, not {request.base_model}: "
                f"launch --model {request.base_model} begins one that does",
                param="base_model",
                code="another_model",
            )
        if request.name == self._own:
            return
        if self._own is not None:
            raise ApiError(
                409,
                f"this run trains one policy, which is {self._own}: use that name to go on, "
                f"or begin another run for {request.name}",
                param="name",
                code="another_policy",
            )
        if request.name == BASE:
            raise ApiError(
                400, f"{request.name} already has another meaning here: choose another name", param="name"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        json_files.write_json(self._path, {"policy": request.name}, durable=True)
        self._own = request.name


def policy_name_routes(known: PolicyName) -> APIRouter:
    """The router of the one route; the same name again is the same name."""
    router = APIRouter(prefix="/slipway")

    @router.post("/policy_name")
    async def name(request: PolicyNamed) -> PolicyNamed:
        try:
            known.take(request)
        except OSError as error:
            message = f"the machine's disk cannot store it: {error.strerror or error}"
            raise ApiError(503, message, code="disk", retry_after_seconds=5) from error
        return request

    return router
