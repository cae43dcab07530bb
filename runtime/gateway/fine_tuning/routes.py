"""`/v1/files` and `/v1/fine_tuning/jobs`, as the `openai` SDK asks for them.

Neighbours: `file_store.py`, `jobs.py` and `job_runner.py` do the work; `gateway.py` includes the router.
Supervised learning alone; parts of OpenAI's API without an effect here are reported in a job's events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Query, Response, UploadFile
from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.gateway.fine_tuning.conversations import ConversationError, check_lengths
from runtime.gateway.fine_tuning.file_store import FINE_TUNE, FileStore
from runtime.gateway.fine_tuning.job_runner import JobRunner, Steps
from runtime.gateway.fine_tuning.jobs import Hyperparameters, Job, JobStore
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.versions.versions import Versions
from runtime.shared.schema import StepSettings

Limit = Annotated[int, Query(ge=1, le=10_000)]
_AUTO = "auto"
ContextTokens = Callable[[], int | None]


class JobRequest(BaseModel):
    """`POST /v1/fine_tuning/jobs`. Hyperparameters may also be a step's own settings, such as `schedule`."""

    model_config = ConfigDict(extra="forbid")

    model: str
    training_file: str
    validation_file: str | None = None
    hyperparameters: dict[str, Any] | None = None
    method: dict[str, Any] | None = None
    seed: int | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    integrations: list[dict[str, Any]] | None = None


class FineTuning:
    """Files, jobs and their driver, wired together: `router` answers, `run` goes on for ever."""

    def __init__(
        self,
        state_dir: Path,
        steps: Steps,
        versions: Versions,
        learning_rate: float,
        context_tokens: ContextTokens,
    ) -> None:
        """`learning_rate`: the run's own; `context_tokens`: of the longest sequence, None while unknown."""
        store, jobs = FileStore(state_dir / "files"), JobStore(state_dir / "fine_tuning")
        runner = JobRunner(jobs, store, steps, versions.named, learning_rate)
        self.run = runner.run
        self.router = APIRouter(prefix="/v1")
        _file_routes(self.router, store, context_tokens)
        _job_routes(self.router, store, jobs, runner, versions)


def _job_routes(
    router: APIRouter, store: FileStore, jobs: JobStore, runner: JobRunner, versions: Versions
) -> None:

    @router.post("/fine_tuning/jobs")
    async def create(request: JobRequest) -> dict[str, Any]:
        if versions.resolve(request.model).version != versions.current:
            message = (
                "training starts from the newest weights: use the policy's name, or restore a checkpoint"
            )
            raise ApiError(400, message, param="model")
        if store.get(request.training_file).purpose != FINE_TUNE:
            raise ApiError(400, f"its purpose is not {FINE_TUNE}", param="training_file")
        hyperparameters, settings = _job_settings(request)
        job = await _on_disk(
            jobs.create, model=request.model, training_file=request.training_file,
            validation_file=request.validation_file, hyperparameters=hyperparameters, settings=settings,
            seed=request.seed, suffix=request.suffix, metadata=request.metadata,
        )  # fmt: skip
        for note in _ignored_fields(request):
            jobs.say(job, note, level="warn")
        runner.wake()
        return job.body()

    @router.get("/fine_tuning/jobs")
    async def list_jobs(after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        return _page([job.body() for job in jobs.list()], after, limit)

    @router.get("/fine_tuning/jobs/{job_id}")
    async def retrieve(job_id: str) -> dict[str, Any]:
        return jobs.get(job_id).body()

    @router.post("/fine_tuning/jobs/{job_id}/cancel")
    async def cancel(job_id: str) -> dict[str, Any]:
        job = jobs.get(job_id)
        if job.status in ("succeeded", "failed"):
            raise ApiError(400, f"the job has {job.status}", param="fine_tuning_job_id")
        if not job.ended:
            await _on_disk(jobs.end, job, "cancelled", "cancelled; completed steps stay in the policy")
            runner.wake()
        return job.body()

    @router.get("/fine_tuning/jobs/{job_id}/events")
    async def events(job_id: str, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        return _page(jobs.events(jobs.get(job_id)), after, limit)

    @router.get("/fine_tuning/jobs/{job_id}/checkpoints")
    async def checkpoints(job_id: str, after: str | None = None, limit: Limit = 10) -> dict[str, Any]:
        return _page(_checkpoints(jobs.get(job_id)), after, limit)


def _file_routes(router: APIRouter, store: FileStore, context_tokens: ContextTokens) -> None:
    @router.post("/files")
    async def upload(file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()]) -> dict[str, Any]:
        if purpose != FINE_TUNE:
            raise ApiError(400, f"files are for {FINE_TUNE} here", param="purpose")
        content = await file.read()
        await _check_lengths(content, context_tokens())
        try:
            return asdict(await store.add(content, file.filename or "file", purpose))
        except OSError as error:
            raise _no_room(error) from error

    @router.get("/files")
    async def list_files(
        after: str | None = None,
        limit: Limit = 10_000,
        purpose: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        found = [asdict(one) for one in store.list() if purpose in (None, one.purpose)]
        return _page(found if order == "desc" else found[::-1], after, limit)

    @router.get("/files/{file_id}")
    async def retrieve_file(file_id: str) -> dict[str, Any]:
        return asdict(store.get(file_id))

    @router.get("/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        return Response(
            await asyncio.to_thread(store.path(file_id).read_bytes), media_type="application/octet-stream"
        )

    @router.delete("/files/{file_id}")
    async def delete(file_id: str) -> dict[str, Any]:
        await _on_disk(store.remove, file_id)
        return {"id": file_id, "object": "file", "deleted": True}


async def _on_disk(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Do the write; a full disk is an answer, not a bug."""
    try:
        return work(*given, **named)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> ApiError:
    message = f"the machine's disk cannot store it: {error.strerror or error}"
    return ApiError(503, message, code="disk", retry_after_seconds=5)


async def _check_lengths(content: bytes, context_tokens: int | None) -> None:
    """Raises ApiError(400) with the line that no engine could take; None: the bound is unknown yet."""
    try:
        if context_tokens is not None:
            await asyncio.to_thread(check_lengths, content, context_tokens)
    except ConversationError as error:
        raise ApiError(400, str(error), param="file", code="context_length_exceeded") from error


def _job_settings(request: JobRequest) -> tuple[Hyperparameters, StepSettings | None]:
    """The job's hyperparameters and its steps' settings. Raises ApiError(400)."""
    method = request.method or {}
    kind = method.get("type", "supervised")
    if kind != "supervised":
        raise ApiError(400, f"method {str(kind)[:40]!r}: only supervised is supported", param="method")
    given = dict(request.hyperparameters or {})
    given |= (method.get("supervised") or {}).get("hyperparameters") or {}
    given = {name: value for name, value in given.items() if value not in (None, _AUTO)}
    own = {name: given.pop(name) for name in Hyperparameters.model_fields if name in given}
    try:
        return Hyperparameters(**own), StepSettings(**given) if given else None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(["hyperparameters", *map(str, first["loc"])])
        raise ApiError(400, f"{where}: {first['msg'].lower()}", param=where) from None


def _ignored_fields(request: JobRequest) -> list[str]:
    """The request's fields without an effect here, in words."""
    notes = []
    if request.validation_file is not None:
        notes.append("validation_file: no loss is measured on it; evaluate the checkpoints by their names")
    if request.suffix is not None:
        notes.append("suffix: the model's name is the policy's with its version")
    if request.integrations:
        notes.append("integrations: launch --wandb online logs the run's steps")
    return notes


def _checkpoints(job: Job) -> list[dict[str, Any]]:
    return [
        {
            "object": "fine_tuning.job.checkpoint",
            "id": one.id,
            "created_at": one.created_at,
            "fine_tuned_model_checkpoint": one.model,
            "fine_tuning_job_id": job.id,
            "step_number": one.step_number,
            "metrics": one.metrics,
        }
        for one in reversed(job.checkpoints)
    ]


def _page(found: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """One page of a list, as OpenAI's SDK turns them."""
    if after is not None:
        place = next((index for index, one in enumerate(found) if one["id"] == after), None)
        if place is None:
            raise ApiError(400, "nothing in the list has this id", param="after")
        found = found[place + 1 :]
    shown = found[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": len(found) > limit, **ends}
