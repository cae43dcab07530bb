"""Fine-tuning jobs in the form of OpenAI's API, and on disk: the request, the progress, the events.

    fine_tuning/ftjob-….json           one job, replaced whole
    fine_tuning/ftjob-….events.jsonl its events, a line each

Neighbours: `routes.py` answers with these; `job_runner.py` drives them. Knows nothing of steps or files.
"""

from __future__ import annotations

import json
import random
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared import json_files
from runtime.shared.schema import StepSettings

Status = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})
MAX_JOBS = 512
_ID = re.compile(r"ftjob-[0-9a-f]{24}")
_EVENTS_SHOWN = 10_000


class Hyperparameters(BaseModel):
    """The settings of a job's steps. `batch_size`: conversations a step."""

    model_config = ConfigDict(extra="forbid")

    n_epochs: int = Field(default=3, ge=1, le=50)
    batch_size: int = Field(default=8, ge=1, le=4096)
    learning_rate_multiplier: float = Field(default=1.0, gt=0)


class EpochCheckpoint(BaseModel):
    """The policy after an epoch."""

    id: str
    created_at: int
    model: str
    step_number: int
    metrics: dict[str, float] = {}


class Job(BaseModel):
    """One job. `steps`: the number of its steps so far."""

    id: str
    created_at: int
    model: str
    training_file: str
    validation_file: str | None = None
    hyperparameters: Hyperparameters = Hyperparameters()
    settings: StepSettings | None = None
    seed: int = 0
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    status: Status = "validating_files"
    steps: int = 0
    trained_tokens: int = 0
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    result_files: list[str] = []
    checkpoints: list[EpochCheckpoint] = []
    losses: list[tuple[int, float]] = []
    error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in ENDED

    def body(self) -> dict[str, Any]:
        """The job as OpenAI's API has it."""
        given = self.hyperparameters.model_dump()
        error = {"code": "job_failed", "message": self.error, "param": None} if self.error else None
        kept = ("id", "created_at", "model", "training_file", "validation_file", "seed", "status",
                "finished_at", "fine_tuned_model", "result_files", "metadata")  # fmt: skip
        return {
            "object": "fine_tuning.job",
            **{name: getattr(self, name) for name in kept},
            "organization_id": "slipway",
            "hyperparameters": given,
            "method": {"type": "supervised", "supervised": {"hyperparameters": given}},
            "trained_tokens": self.trained_tokens if self.ended else None,
            "error": error,
            "user_provided_suffix": self.suffix,
        }


class JobStore:
    """All jobs of the run. The gateway's event loop is its only user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._jobs: dict[str, Job] = {}
        for path in sorted(folder.glob("ftjob-*.json")):
            job = Job.model_validate_json(path.read_text())
            self._jobs[job.id] = job

    def create(self, **fields: Any) -> Job:
        """A new job, on disk. Raises ApiError, OSError."""
        if len(self._jobs) >= MAX_JOBS:
            raise ApiError(429, f"the run has had {MAX_JOBS} jobs already", code="too_many_jobs")
        seed = fields.pop("seed", None)
        job = Job(
            # Ids are in the order of their making.
            id=f"ftjob-{time.time_ns():016x}{uuid.uuid4().hex[:8]}",
            created_at=int(time.time()),
            seed=random.getrandbits(31) if seed is None else seed,
            **fields,
        )
        self.save(job)
        self._jobs[job.id] = job
        return job

    def save(self, job: Job) -> None:
        """Write it down as it is now. Raises OSError."""
        json_files.write_json(self._folder / f"{job.id}.json", job.model_dump(mode="json"), durable=True)

    def get(self, job_id: str) -> Job:
        """Raises ApiError(404)."""
        if not _ID.fullmatch(job_id) or job_id not in self._jobs:
            message = "there is no such fine-tuning job"
            raise ApiError(404, message, param="fine_tuning_job_id", code="not_found")
        return self._jobs[job_id]

    def list(self) -> Sequence[Job]:
        """All of them, the newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.id, reverse=True)

    def waiting(self) -> Job | None:
        """The oldest that has not ended."""
        return next((job for job in reversed(self.list()) if not job.ended), None)

    def end(self, job: Job, status: Status, message: str) -> None:
        """End the job with its last event. Raises OSError."""
        job.status, job.finished_at = status, int(time.time())
        if status == "failed":
            job.error = message
        self.save(job)
        self.say(job, message, level="error" if status == "failed" else "info")

    def say(
        self, job: Job, message: str, *, level: str = "info", metrics: dict[str, float] | None = None
    ) -> None:
        """Record an event. Raises OSError."""
        event = {
            "object": "fine_tuning.job.event", "id": f"ftevent-{uuid.uuid4().hex[:24]}", "level": level,
            "created_at": int(time.time()), "message": message, "data": metrics or {},
            "type": "metrics" if metrics else "message",
        }  # fmt: skip
        json_files.append_line(self._folder / f"{job.id}.events.jsonl", event)

    def events(self, job: Job) -> Sequence[dict[str, Any]]:
        """The events, the newest first."""
        try:
            lines = (self._folder / f"{job.id}.events.jsonl").read_text().split("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[-_EVENTS_SHOWN:] if line][::-1]
