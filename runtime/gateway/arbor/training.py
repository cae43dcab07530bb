"""Rounds of jobs become training steps: each once, whatever dies in between, and of every group one.

These clients send the same group under many ids, and what their queue still has from the round before. So a
round's groups are first made groups of samples: one that comes again counts only if answers were given that
no other group has. Its key is made of the job's id and the round's number, by which the queue knows it again.
Neighbours: jobs.py closes rounds; from_text.py says which samples texts are; the queue of steps trains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from runtime.gateway.arbor.job import Job, Outcome
from runtime.gateway.http.step_errors import NothingToTrainError, QueueFullError
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.versions.versions import Versions
from runtime.shared.schema import Group, StepRequest, StepSettings
from runtime.shared.statuses import StepStatus

log = logging.getLogger(__name__)

# A client that sends nothing for so long, and asks nothing, has sent its round.
SILENT_SECONDS = 60.0
# A queue that is full, or a disk that takes nothing, is asked again so often.
AGAIN_SECONDS = 2.0
_LOOK_SECONDS = 5.0
_WAIT_SECONDS = 30.0

Resolve = Callable[[list[Group], Callable[[str], bool]], Awaitable[list[Group]]]


@dataclass
class Fresh:
    """The groups of a round that are to be trained, and how many came only once more."""

    groups: list[Group]
    copies: int


class Rounds:
    """Trains the rounds of all jobs, in order. The gateway's event loop is its only user."""

    def __init__(self, jobs: dict[str, Job], steps: StepQueue, versions: Versions, resolve: Resolve) -> None:
        self._jobs = jobs
        self._steps = steps
        self._versions = versions
        self._resolve = resolve
        self.wake = asyncio.Event()
        known = {status.key for status in steps.list()}
        for job in jobs.values():
            if key_of(job, job.open) in known:  # given to the queue before the gateway ended
                job.close()

    async def run(self) -> None:
        """For ever."""
        while True:
            for job in list(self._jobs.values()):
                if time.monotonic() - job.touched > SILENT_SECONDS and job.close():
                    log.info("%s: its client is silent; what it sent is trained", job.id)
                for number in job.waiting:
                    await self._train_or_fail(job, number)
            self.wake.clear()
            if not any(job.waiting for job in self._jobs.values()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), _LOOK_SECONDS)

    async def _train_or_fail(self, job: Job, number: int) -> None:
        """One round must not cost the others theirs."""
        try:
            outcome = await self._train(job, number)
        except Exception as error:
            log.error("%s round %d", job.id, number, exc_info=error)
            outcome = self._outcome("failed", error=f"{type(error).__name__}: {error}")
        if outcome.kind != "trained":
            log.warning("%s round %d: %s", job.id, number, outcome.error)
        while True:
            try:
                job.end(number, outcome)
                return
            except OSError as error:
                log.warning("%s round %d waits: %s", job.id, number, error)
                await asyncio.sleep(AGAIN_SECONDS)

    async def _train(self, job: Job, number: int) -> Outcome:
        key = key_of(job, number)
        fresh = Fresh([], 0)
        status = next((status for status in self._steps.list() if status.key == key), None)
        if status is None:
            fresh = await self._fresh(job, number)
            if not fresh.groups:
                why = "every group had come before" if fresh.copies else "no group has a member"
                return self._outcome("nothing", fresh, error=why)
            try:
                status = await self._submit(job, key, fresh.groups)
            except NothingToTrainError as error:
                nothing = self._outcome("nothing", fresh, error=str(error))
                return nothing.model_copy(update={"counts": error.counts})
        while status.state not in ("published", "failed"):
            status = await self._steps.wait(status.id, _WAIT_SECONDS)
        return self._ended(status, fresh)

    def _ended(self, status: StepStatus, fresh: Fresh) -> Outcome:
        """How a round ended, by its step's end."""
        nothing = status.state == "failed" and status.version is None and not status.counts.trained
        kind = "trained" if status.state == "published" else "nothing" if nothing else "failed"
        said = self._outcome(kind, fresh, error=status.error)
        groups = fresh.groups or range(status.counts.groups)
        version = said.version if status.version is None else status.version
        return said.model_copy(
            update={"step": status.id, "version": version, "counts": status.counts, "groups": len(groups)}
        )

    async def _submit(self, job: Job, key: str, groups: list[Group]) -> StepStatus:
        settings = job.file.settings
        if settings != StepSettings():
            settings = settings.model_copy(update={"schedule_step": job.trained})
        request = StepRequest(key=key, groups=groups, settings=settings)
        while True:
            try:
                return await self._steps.submit(request)
            except (QueueFullError, OSError) as error:  # nothing of it is lost by waiting
                log.warning("%s waits: %s", key, error)
                await asyncio.sleep(AGAIN_SECONDS)

    # ------------------------------------------------------------------ which groups there are

    async def _fresh(self, job: Job, number: int) -> Fresh:
        """A round's groups by their samples, each once."""
        first: dict[str, Group] = {}
        again: list[Group] = []
        for batch in job.rounds[number]:
            for place, (members, digest) in enumerate(zip(batch.groups, batch.contents, strict=True)):
                group = Group(id=f"{batch.batch}.{place}", members=members)
                if digest in first or digest in job.contents:
                    again.append(group)
                else:
                    first[digest] = group
        groups = await self._resolve(list(first.values()), self._steps.has)
        job.contents.update(first)
        kept = [*groups]
        named = {member.sample for group in groups for member in group.members if member.sample}

        def taken(sample: str) -> bool:
            return sample in named or self._steps.has(sample)

        for group in await self._resolve(again, taken):
            samples = {member.sample for member in group.members if member.sample}
            if samples and not any(map(taken, samples)):
                kept.append(group)
                named |= samples
        return Fresh(kept, len(first) + len(again) - len(kept))

    def _outcome(self, kind: str, fresh: Fresh | None = None, error: str | None = None) -> Outcome:
        return Outcome.model_validate(
            {
                "kind": kind,
                "version": self._versions.current,
                "error": error,
                "groups": len(fresh.groups) if fresh else 0,
                "copies": fresh.copies if fresh else 0,
            }
        )


def key_of(job: Job, number: int) -> str:
    """The key of a round's step: of the job and the round alone."""
    return f"arbor:{job.folder.name}:{number}"
