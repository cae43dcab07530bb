"""What Arbor's clients are answered: a job as they read it, a checkpoint, and why something is refused.

Every route that is about a job answers with the same fields; a client reads those it knows. Ours beside them,
`notes`, `metrics` and `last_round`, say what became of what it sent. Neighbours: jobs.py. Pure.
"""

from __future__ import annotations

import time
from typing import Any

from runtime.gateway.arbor import job_names
from runtime.gateway.arbor.job import Job
from runtime.gateway.http.openai_errors import ApiError
from runtime.shared.statuses import CheckpointInfo


def reply(job: Job, model: str | None = None) -> dict[str, Any]:
    """What every route answers."""
    newest = max(job.file.outcomes, default=0)
    outcomes = job.file.outcomes.values()
    return {
        "job_id": job.id,
        "status": job.file.state,
        "current_model": model or job_names.after_round(job.id, newest),
        "checkpoints": job.file.checkpoints,
        "last_checkpoint": job.file.last_checkpoint,
        "pending_batch_ids": job.listed,
        "notes": job.file.notes,
        "metrics": {
            **job.file.metrics,
            "rounds": len(job.file.outcomes),
            "rounds_trained": job.trained,
            "groups_trained": sum(one.groups for one in outcomes if one.kind == "trained"),
            "copies": sum(one.copies for one in outcomes),
            "samples_trained": sum(one.counts.trained for one in outcomes if one.kind == "trained"),
            "retokenised": sum(one.counts.retokenised for one in outcomes),
        },
        "last_round": job.file.outcomes[newest].model_dump() if newest else None,
    }


def refused(refusals: list[dict[str, str]]) -> ApiError:
    """400, with each key and the way to have it."""
    words = [f"{one['key']}: {one['why']}" for one in refusals]
    options = " ".join(one["launch"] for one in refusals if one.get("launch"))
    way = f". A run that has them starts with: launch {options}" if options else ""
    return ApiError(
        400, "; ".join(words) + way, param=f"trainer_config.{refusals[0]['key']}", code="settings_refused",
        details={"refusals": refusals},
    )  # fmt: skip


def why_untrained(job: Job) -> str:
    """Why a job has nothing to show."""
    if not job.file.outcomes:
        return "the job ends without one training step: no group was ever sent"
    last = job.file.outcomes[max(job.file.outcomes)]
    return (
        f"nothing could be trained in the last {job.untrained_in_a_row} rounds; of the last one: {last.error}"
    )


def checkpoint(name: str, pinned: CheckpointInfo | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as Arbor's clients read it; before the first step it is the model as it came."""
    return {
        "checkpoint_name": name,
        "checkpoint_dir": f"checkpoints/{pinned.name}" if pinned else None,
        "global_step": pinned.step if pinned else 0,
        "version": pinned.version if pinned else 0,
        "metadata": metadata,
        "timestamp": time.time(),
    }
