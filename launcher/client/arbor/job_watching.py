"""Arbor's `watch_job` and `shutdown_job`, for the trainings of this program and those of others in its run.

Neighbours: `jobs.py` has this process's own; those of other programs are read from the run's `grpo.jsonl`,
and `fine_tuning_jobs.py` has those that OpenAI's SDK began.
Neither function touches the run itself. Knows nothing of DSPy.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.arbor import jobs, server
from launcher.client.arbor.fine_tuning_jobs import FineTuningJob
from launcher.client.arbor.jobs import Job
from launcher.client.arbor.stderr_log import log

_FINAL_STATES = ("succeeded", "failed", "cancelled")


class _WatchedJob(Protocol):
    def status(self) -> str: ...

    def entries(self) -> Sequence[dict[str, Any]]: ...

    def wait(self, seconds: float) -> None: ...


@dataclass
class _LocalJob:
    job: Job

    def status(self) -> str:
        return self.job.status

    def entries(self) -> Sequence[dict[str, Any]]:
        return list(self.job.history)

    def wait(self, seconds: float) -> None:
        self.job.is_over.wait(seconds)


@dataclass
class _LoggedJob:
    """A job of another program in this run. That it has ended is known by its last step alone."""

    path: Path
    job_id: str

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        whole = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [it for line in whole if (it := json.loads(line)).get("compile") == self.job_id]

    def is_known(self) -> bool:
        return bool(self._lines())

    def status(self) -> str:
        lines = self._lines()
        steps = max((it.get("steps", 0) for it in lines if it["kind"] == "compile"), default=math.inf)
        done = max((it["step"] for it in lines if it["kind"] == "step"), default=0)
        return "succeeded" if done >= steps else "running"

    def entries(self) -> Sequence[dict[str, Any]]:
        return [it for it in self._lines() if it["kind"] != "compile"]

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def watch_job(
    job_id: str, max_time: float = 1800, update_interval: float = 10, show_logs: bool = True
) -> None:
    """Print a job's steps, validations and alarms as they come, until it ends or `max_time` is over.

    `show_logs=False`: its states alone. An ArborGRPO logs its job's id as it begins (`optimizer.job.id`).
    Raises ValueError for an id that this run does not know.
    """
    followed = _find_job(job_id)
    deadline = time.monotonic() + max_time
    shown, known = 0, None
    while True:
        # Asked before the entries: later entries will be shown by the next look.
        status = followed.status()
        entries = followed.entries()
        if show_logs:
            for entry in entries[shown:]:
                _print(_entry_text(entry))
        shown = len(entries)
        if status != known:
            _print(f"job {job_id}: {status}")
            known = status
        left = deadline - time.monotonic()
        if status in _FINAL_STATES:
            return
        if left <= 0:
            _print(f"job {job_id}: not watched any longer after {max_time:g} seconds; it goes on")
            return
        followed.wait(min(max(update_interval, 0.05), left))


def shutdown_job(job_identifier: str) -> dict[str, Any]:
    """Have a job take no more steps; the best it has found is served, and its `compile` returns.

    The machine, the endpoint and the other jobs go on. A model's name instead of a job's id ends nothing: the
    run's model stays served until the run ends. Raises ValueError for a job of another program.
    """
    job = jobs.find(job_identifier)
    if job is not None:
        if not job.is_over.is_set():
            job.is_cancelled.set()
            log(f"job {job.id} takes no more steps; the run itself goes on")
        status = "cancelled" if job.status == "running" else job.status
        return {"type": "training_job", "status": status, "job_id": job.id}
    session = server.session()
    if session.run_dir is not None and _LoggedJob(session.run_dir / "grpo.jsonl", job_identifier).is_known():
        raise ValueError(f"job {job_identifier} is another program's: end it in that program, with Ctrl-C")
    at_the_endpoint = FineTuningJob(session.connection, job_identifier)
    if at_the_endpoint.is_known():
        return {"type": "training_job", "status": at_the_endpoint.cancel(), "job_id": job_identifier}
    log(f"no job is called {job_identifier}; the model stays served until: launch down {session.run_id}")
    return {"type": "inference_job", "status": "running", "model": job_identifier}


def _find_job(job_id: str) -> _WatchedJob:
    job = jobs.find(job_id)
    if job is not None:
        return _LocalJob(job)
    session = server.session()
    candidates: list[_LoggedJob | FineTuningJob] = [FineTuningJob(session.connection, job_id)]
    if session.run_dir is not None:
        candidates.insert(0, _LoggedJob(session.run_dir / "grpo.jsonl", job_id))
    for it in candidates:
        if it.is_known():
            return it
    known = ", ".join(jobs.ids()) or "none so far"
    raise ValueError(f"this run has no job {job_id!r}; the jobs of this program: {known}")


def _entry_text(entry: dict[str, Any]) -> str:
    match entry["kind"]:
        case "step":
            counts = entry["counts"]
            return (
                f"  step {entry['step']}: reward {_number(entry['reward'])}, "
                f"trained {counts['trained']} of {counts['samples']} samples, version {entry['version']}"
            )
        case "validation":
            return f"  validation after {entry['step']} steps: score {_number(entry['score'])}"
        case "alarm":
            return f"  alarm {entry['name']} after {entry['step']} steps: {entry['text']}"
        case "rewind":
            return f"  the machine was lost: back from step {entry['from']} to step {entry['to']}"
        case "event":
            return f"  {entry['text']}"
    return f"  {entry['kind']}"


def _number(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{value:.3f}"


def _print(text: str) -> None:
    sys.stdout.write(f"{sanitized(text)}\n")
    sys.stdout.flush()
