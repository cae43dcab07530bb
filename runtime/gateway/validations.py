"""`POST /slipway/validations`: a held-out score, kept in `validations.jsonl` and shown with the training.

Neighbours: gateway.py mounts it; `runtime/shared/validations.py` has the file's form; an optimizer sends one
each time it validates. The same validation sent again is one entry; a different one, as after a lost machine,
replaces it. Knows nothing of the scored program.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared import json_files, validations
from runtime.shared.schema import Validation

# More than any training validates; a program gone wrong must not fill the disk.
MAX_VALIDATIONS = 20_000


class Validations:
    """The file of one run. `committed` is its newest committed step: validations of later steps are
    removed."""

    def __init__(self, state_dir: Path, committed: int) -> None:
        self._path = state_dir / validations.FILE
        self._lock = threading.Lock()
        kept = [it for it in validations.read(self._path) if int(it.get("version") or 0) <= committed]
        if self._path.exists():
            json_files.replace_lines(self._path, kept)
        self._newest = {validations.key_of(line): line for line in kept}

    def add(self, validation: Validation, version: int) -> None:
        """Keep one; `version` is the served version, for a client that does not name the scored one.
        Raises OSError."""
        line = validation.model_dump(exclude={"rollouts"})
        if line["version"] is None:
            line["version"] = version
        with self._lock:
            known = self._newest.get(validations.key_of(line))
            if known is not None and {**known, "time": None} == {**line, "time": None}:
                return
            if len(self._newest) >= MAX_VALIDATIONS:
                raise ApiError(
                    409, f"this run has {MAX_VALIDATIONS} validations, which is the maximum", code="too_many"
                )
            line["time"] = round(time.time(), 3)
            json_files.append_line(self._path, line)
            self._newest[validations.key_of(line)] = line

    def list(self) -> Sequence[dict[str, Any]]:
        """The newest of each compile, step and name, in the order of their first entries."""
        with self._lock:
            return [*self._newest.values()]


def validation_routes(
    kept: Validations, version: Callable[[], int], texts_of: Callable[[Validation, int], Callable[[], None]]
) -> APIRouter:
    """The router of the two routes. `texts_of` finds a validation's rollouts; what it returns writes their
    texts, in a thread."""
    router = APIRouter(prefix="/slipway")

    @router.post("/validations", status_code=204)
    async def take(validation: Validation) -> Response:
        served = version()
        try:
            await asyncio.to_thread(kept.add, validation, served)
            if validation.rollouts:
                of = served if validation.version is None else validation.version
                await asyncio.to_thread(texts_of(validation, of))
        except OSError as error:  # a full disk: it is sent again
            message = f"the machine's disk cannot store it: {error.strerror or error}"
            raise ApiError(503, message, code="disk", retry_after_seconds=5) from error
        return Response(status_code=204)

    @router.get("/validations")
    async def listed() -> Sequence[dict[str, Any]]:
        return kept.list()

    return router
