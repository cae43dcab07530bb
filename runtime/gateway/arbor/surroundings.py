"""What jobs need of the rest of the gateway, and what becomes of its disk's errors.

Neighbours: gateway.py gives a Runtime; jobs.py works with it. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from runtime.gateway.arbor.training import Resolve
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.versions.versions import Versions
from runtime.shared.schema import StepSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Meant:
    """What a client's trainer_config means here: settings of its steps, what to tell it, what cannot be.

    A refusal: the key, why, and the options of a launch that would make it fit.
    """

    settings: StepSettings = field(default_factory=StepSettings)
    notes: list[str] = field(default_factory=list)
    refusals: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Runtime:
    """What jobs need of the rest of the gateway."""

    state_dir: Path
    steps: StepQueue
    versions: Versions
    # The policy's name.
    alias: str
    resolve: Resolve
    # How many samples were ever recorded; where the runtime stands, and why.
    samples: Callable[[], int]
    phase: Callable[[], tuple[str, str | None]]
    meaning: Callable[[dict[str, Any]], Meant]
    # A held-out score that a client measured: its job, how many steps that had taken, the score.
    validated: Callable[[str, int, float], None]


def on_disk(work: Callable[[], T]) -> T:
    """Write; a disk that takes nothing is the client's to try again. Raises ApiError(503)."""
    try:
        return work()
    except OSError as error:
        raise _disk_error(error) from error


async def disk(work: Awaitable[T]) -> T:
    """The same for what is awaited. Raises ApiError(503)."""
    try:
        return await work
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> ApiError:
    message = f"the machine's disk does not take it: {error.strerror or error}"
    return ApiError(503, message, code="disk", retry_after_seconds=5)
