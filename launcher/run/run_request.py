"""The request for one run, validated and agreed to: the input of `run.py`. A value; it does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.run.resume_point import ResumePoint
from launcher.types.plan import Plan
from launcher.types.settings import Settings


@dataclass(frozen=True)
class RunRequest:
    """`model_path` is a folder or a hub name; without a `command` the endpoint is held.

    `folder`: the command's folder, None for this one. `resumed`: the run to resume, None for a new one.
    `started_by`: the line that was typed, for the hints of its program.
    """

    settings: Settings
    plan: Plan
    model_path: str
    command: tuple[str, ...] = ()
    folder: Path | None = None
    resumed: ResumePoint | None = None
    started_by: str | None = None
