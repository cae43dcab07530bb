"""What an Arbor client may ask of its jobs, and what it is answered: each wait bounded, no error a success.

    initialize    a job, with the settings that the client's trainer_config means here
    status        the open round is closed; while it trains nothing is pending, then new ids are
    step          a batch is taken into the open round, once per id
    checkpoint    the newest committed checkpoint is pinned under the client's name
    terminate     the open round is trained, and the job is over; the run goes on, as it does after a cancel

Neighbours: routes.py speaks HTTP; job.py has a job on disk; training.py trains what is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from runtime.gateway.arbor import bodies, job_names, replies
from runtime.gateway.arbor import job as jobs_on_disk
from runtime.gateway.arbor.batch_ids import BatchIds
from runtime.gateway.arbor.job import Job, JobFile, State
from runtime.gateway.arbor.replies import reply
from runtime.gateway.arbor.surroundings import Runtime, disk, on_disk
from runtime.gateway.arbor.training import Rounds
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.steps.rewind import Rewind
from runtime.shared.statuses import CheckpointInfo

log = logging.getLogger(__name__)

# Stock optimizers send no more groups than there are ids, and throw the rest of what they rolled out away.
LEAST_LISTED = 64
MOST_LISTED = 1024
MOST_JOBS = 64
MOST_CHECKPOINTS = 64
# So long a question waits for a round that trains; then the client asks again.
STATUS_SECONDS = 20.0
TERMINATE_SECONDS = 3600.0
# A runtime that was less than ready for so long is an error to whoever waits for it.
DEGRADED_SECONDS = 300.0
# A client whose rounds had nothing to train so often in a row has something wrong with it.
MOST_UNTRAINED = 8


class Jobs:
    """All jobs of the run. The gateway's event loop is its only user."""

    def __init__(self, runtime: Runtime) -> None:
        self._root = runtime.state_dir / "arbor"
        self._runtime = runtime
        self._jobs = jobs_on_disk.read_all(self._root)
        self._rewound = Rewind.read(runtime.state_dir)
        self._ids = BatchIds()
        # When the runtime was first and last seen degraded, of looks that followed one another.
        self._degraded = (0.0, -math.inf)
        self.rounds = Rounds(self._jobs, runtime.steps, runtime.versions, runtime.resolve)

    def model(self, name: str) -> str | None:
        """The policy's name for what a job's name means; None where it is no job's."""
        said, number, version = job_names.parts(name)
        job = self._jobs.get(said)
        if job is None:
            return None
        if number is not None:
            version = job.version_at(number)
        return self._runtime.alias if version is None else self._runtime.versions.named(version)

    # ------------------------------------------------------------------ what is asked

    async def initialize(self, said: dict[str, Any]) -> dict[str, Any]:
        """Begin a job. Raises ApiError: 400 for settings this run cannot have, 404 for another model."""
        self._check_phase()
        name = said.get("model")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "model is missing", param="model")
        served = self._runtime.versions.resolve(name)
        meant = self._runtime.meaning(_trainer_config(said))
        if meant.refusals:
            raise replies.refused(meant.refusals)
        notes = list(meant.notes)
        if served.version != self._runtime.versions.current:
            notes.append(f"training goes on from the newest version, not from {name}")
        short = name.removeprefix("openai/").removeprefix("arbor:")
        former = self._jobs.get(job_names.parts(short)[0])
        file = JobFile(
            id=job_names.new(former.file.model if former else short),
            model=former.file.model if former else short,
            created=time.time(),
            generations=_generations(said),
            version=self._runtime.versions.current,
            settings=meant.settings,
            notes=notes,
        )
        self._make_room()
        job = self._jobs[file.id] = on_disk(lambda: jobs_on_disk.new(self._root, file))
        job.sampled = self._runtime.samples()
        log.info("%s begins: %s", job.id, "; ".join(notes) or "nothing to note")
        return reply(job, job_names.after_round(job.id, 0))

    async def status(self, said: dict[str, Any]) -> dict[str, Any]:
        """What is pending: nothing while the job's last round trains, then more ids than it has groups.

        Raises ApiError where its last round failed, or none had anything to train for too long.
        """
        job = self._job(said)
        self._check_phase()
        if not job.file.asked:
            job.file.asked = True
            on_disk(job.save)
        await self._settle(job, STATUS_SECONDS)
        self._check(job)
        # These clients ask until something is pending, for ever: of a job that has ended nothing will be.
        _check_running(job)
        if job.waiting:
            return reply(job) | {"pending_batch_ids": []}
        job.listed = self._ids.listed(job.listed, job.batches, self._listed(job))
        return reply(job)

    async def step(self, said: dict[str, Any]) -> dict[str, Any]:
        """Take a batch in, on disk: the same again is the same. Raises ApiError, 409 for an id used already
        for other groups."""
        posted = bodies.posted(said)
        job = self._job(said)
        number, known = job.batches.get(posted.batch, (job.open, None))
        if known is not None and known != posted.digest:
            raise ApiError(
                409, f"batch {posted.batch} was sent before, with other groups", param="batch_id",
                code="key_reused",
            )  # fmt: skip
        self._check(job)
        if known is None:
            self._check_phase()
            _check_running(job)
            on_disk(lambda: job.take(posted))
            self._measured(job, number, posted.metrics)
            if job.listed and all(one in job.batches for one in job.listed):
                self._close(job)  # all that the client was asked for
        return reply(job, job_names.after_round(job.id, number))

    async def checkpoint(self, said: dict[str, Any]) -> dict[str, Any]:
        """Pin what is committed under the client's name for it. Raises ApiError."""
        name = bodies.checkpoint_name(said)
        job = self._job(said)
        self._check(job)
        if name not in job.file.checkpoints and len(job.file.checkpoints) >= MOST_CHECKPOINTS:
            raise ApiError(400, f"a job has {MOST_CHECKPOINTS} names of checkpoints at most")
        metadata = said.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        best_of = job.folder.name if "score" in metadata else None
        pinned = await disk(self._pin(best_of))
        made = replies.checkpoint(name, pinned, metadata)
        before = job.file.checkpoints.get(name, {})
        if {**before, "timestamp": made["timestamp"]} != made:  # the same again is the same
            job.file.checkpoints = job.file.checkpoints | {name: made}
        job.file.last_checkpoint = name
        on_disk(job.save)
        return reply(job)

    async def terminate(self, said: dict[str, Any]) -> dict[str, Any]:
        """The job is over once what was sent is trained. Raises ApiError where nothing ever was."""
        job = self._job(said)
        if job.file.state == "running":
            await self._settle(job, TERMINATE_SECONDS)
            self._check(job)
            if job.waiting:
                raise ApiError(503, "the job's last round still trains: terminate again", code="not_ready")
            self._end(job, "succeeded")
        self._check(job)
        if job.file.asked and not job.trained and job.file.state == "succeeded":
            raise ApiError(422, replies.why_untrained(job), code="nothing_trained")
        return reply(job, job_names.of_version(job.id, job.last_version))

    async def cancel(self, said: dict[str, Any]) -> dict[str, Any]:
        """The job is over at once; what was sent and is not being trained is left out, and said."""
        job = self._job(said)
        if job.file.state == "running":
            if left := on_disk(job.discard):
                job.file.notes = [*job.file.notes, f"{left} batches were not trained: the job was cancelled"]
            self._end(job, "cancelled")
        self._check(job)
        return reply(job, job_names.of_version(job.id, job.last_version))

    # ------------------------------------------------------------------ on the way

    def _job(self, said: dict[str, Any]) -> Job:
        name = bodies.job_of(said)
        job = self._jobs.get(name)
        if job is None and self._rewound is not None and job_names.folder_of(name):
            raise ApiError(
                409,
                f"this job is not known here: the machine was lost, and the run went back to step "
                f"{self._rewound.to_step}; begin the training again",
                code="rewound",
                details={"step": self._rewound.to_step},
            )
        if job is None:
            message = "there is no such job: initialize begins one"
            raise ApiError(404, message, param="job_id", code="not_found")
        job.touched = time.monotonic()
        return job

    def _check(self, job: Job) -> None:
        """Raise what went wrong with the job: its client must not go on as if it had not."""
        if job.file.state == "failed":
            raise ApiError(500, f"a training step failed: {job.file.error}", code="step_failed")
        if job.file.state == "running" and job.untrained_in_a_row >= MOST_UNTRAINED:
            raise ApiError(422, replies.why_untrained(job), code="nothing_to_train")

    def _check_phase(self) -> None:
        """Raise ApiError(503) where nothing can be trained, or could not be for long."""
        (phase, detail), now = self._runtime.phase(), time.monotonic()
        first, last = self._degraded
        if phase == "degraded":
            self._degraded = (first if now - last < STATUS_SECONDS * 2 else now, now)
        lasting = phase == "degraded" and now - self._degraded[0] > DEGRADED_SECONDS
        if phase in ("failed", "stopping") or lasting:
            raise ApiError(503, f"the runtime is {phase}: {detail or 'see its log'}", code="not_ready")

    def _close(self, job: Job) -> None:
        if job.close():
            job.sampled = self._runtime.samples()
            self.rounds.wake.set()

    async def _settle(self, job: Job, seconds: float) -> None:
        """Have what was sent trained; until it is, or the wait has ended."""
        self._close(job)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.idle.wait(), seconds)
        job.touched = time.monotonic()

    def _listed(self, job: Job) -> int:
        """How many ids: an optimizer whose queue is shorter than that sends all it has just rolled out.

        What its queue may still have is less than the groups of a round; these are less than the answers
        given since the last one, by the size of a group.
        """
        rolled_out = math.ceil((self._runtime.samples() - job.sampled) / job.file.generations)
        newest = max(job.file.outcomes, default=0)
        before = job.file.outcomes[newest].groups if newest else 0
        return min(MOST_LISTED, max(LEAST_LISTED, rolled_out + max(rolled_out, before)))

    def _measured(self, job: Job, number: int, metrics: Mapping[str, float]) -> None:
        """What a client measured before round `number`: it says so with each of its batches."""
        job.file.metrics = {**job.file.metrics, **metrics}
        score = metrics.get("validation_score")
        if score is not None and job.measured < number:
            job.measured = number
            self._runtime.validated(job.folder.name, job.trained, score)

    async def _pin(self, best_of: str | None) -> CheckpointInfo | None:
        """The newest committed checkpoint, kept; None before the first one."""
        steps = self._runtime.steps
        newest = await asyncio.to_thread(steps.checkpoints.newest)
        return None if newest is None else await steps.pin(newest.name, best_of)

    def _make_room(self) -> None:
        """Of more jobs than are kept the oldest goes that is over, or that waits for nothing."""
        while len(self._jobs) >= MOST_JOBS:
            over = [job for job in self._jobs.values() if job.file.state != "running" and not job.rounds]
            idle = [job for job in self._jobs.values() if not job.rounds]
            if not idle:
                message = f"{MOST_JOBS} jobs are training"
                raise ApiError(429, message, code="queue_full", retry_after_seconds=5)
            job = (over or idle)[0]
            del self._jobs[job.id]
            job.remove()

    def _end(self, job: Job, state: State) -> None:
        job.file.state = state
        job.listed = []
        on_disk(job.save)


def _check_running(job: Job) -> None:
    if job.file.state != "running":
        raise ApiError(409, f"the job has ended ({job.file.state})", code="job_ended")


def _trainer_config(said: dict[str, Any]) -> dict[str, Any]:
    config = said.get("trainer_config")
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ApiError(400, "trainer_config must be an object", param="trainer_config")
    return config


def _generations(said: dict[str, Any]) -> int:
    """How many completions a group has; 1 where it is not said."""
    given = _trainer_config(said).get("num_generations")
    return given if isinstance(given, int) and given >= 1 else 1
