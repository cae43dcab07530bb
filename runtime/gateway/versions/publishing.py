"""Publishing: a committed checkpoint becomes the served policy. Every engine is verified, then the alias
moves.

Neighbours: version_check.py stages and verifies; versions.py holds the alias; queue.py calls `publish` after
each commit; engine_pool.py calls `reload_after_restart` for a restarted engine; reload.py brings back an
older version that is named. Every attempt is a line in `publications.jsonl`. Knows nothing of the comparisons
in a check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.engines.version_check import AdapterVerifier, VerificationError
from runtime.gateway.http.step_errors import NotPublishedError
from runtime.gateway.versions.reload import OnDemandReload
from runtime.gateway.versions.versions import Versions
from runtime.shared import failpoints, json_files
from runtime.shared.checkpoint import Checkpoint, CheckpointError, CheckpointStore, checkpoint_name
from runtime.shared.process_status import SupervisorStatus

log = logging.getLogger(__name__)

# An engine that died is back within this.
ENGINES_SECONDS = 180.0
# Refusals by engines that all live, and attempts in all.
REFUSALS = 2
ATTEMPTS = 5


class Publisher:
    """Moves the alias, and only after a proof."""

    def __init__(
        self,
        engines: list[EngineClient],
        supervisor_status: SupervisorStatus,
        verifier: AdapterVerifier,
        versions: Versions,
        checkpoints: CheckpointStore,
        state_dir: Path,
    ) -> None:
        self._verifier = verifier
        self._versions = versions
        self._checkpoints = checkpoints
        self._record = state_dir / "publications.jsonl"
        self._reload_on_demand = OnDemandReload(verifier, versions, checkpoints, self._record)
        self._pool = EnginePool(engines, supervisor_status, self.reload_after_restart, self._reload_on_demand)

    @property
    def pool(self) -> EnginePool:
        """The engines, which get the served versions again after a restart."""
        return self._pool

    async def publish(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Serve the checkpoint as the newest version. Raises NotPublishedError: the old one stays."""
        refusals = 0
        reason = ""
        for _ in range(ATTEMPTS):
            started = time.monotonic()
            if not await self._pool.until_all_ready(ENGINES_SECONDS):
                reason = f"not every engine was ready within {ENGINES_SECONDS:.0f} s; {reason}"
                self._write(checkpoint, "failed", started, reason=reason)
                break
            try:
                proof = asdict(await self._verifier.verify(checkpoint))
            except VerificationError as error:
                self._write(checkpoint, "failed", started, reason=str(error))
                log.error("version %d not published: %s", checkpoint.version, error)
                reason = str(error)
                # An engine that died meanwhile proves nothing about the checkpoint: it is waited for.
                refusals += not await self._pool.check_all()
                if refusals == REFUSALS:
                    break
                continue
            failpoints.failpoint("gateway.staged")
            self._versions.move(checkpoint.version, checkpoint.step)
            failpoints.failpoint("gateway.moved")
            proof["seconds"] = round(time.monotonic() - started, 4)
            self._write(checkpoint, "published", started, **proof)
            await self._retire()
            return proof
        raise NotPublishedError(reason)

    async def _retire(self) -> None:
        """Unload unused versions. A failure harms nothing yet: it is tried again after the next step."""
        try:
            async with self._reload_on_demand.lock:
                await self._verifier.unload_unused(self._versions.retire)
        except EngineError as error:
            log.warning("old versions not unloaded: %s", error)

    async def reload_after_restart(self, engine: EngineClient) -> None:
        """Give a fresh engine every version requests may ask of it.

        Raises VerificationError or CheckpointError when the alias's own version cannot be brought; an older
        one that cannot is no longer served.
        """
        for version in sorted(self._versions.staged - {0}, reverse=True):
            try:
                name = checkpoint_name(version)
                await self._verifier.verify_on(
                    [engine], await asyncio.to_thread(self._checkpoints.load, name)
                )
            except (VerificationError, CheckpointError) as error:
                if version == self._versions.current:
                    raise
                log.warning("version %d is no longer served: %s", version, error)
                self._versions.forget(version)

    def _write(self, checkpoint: Checkpoint, outcome: str, started: float, **details: Any) -> None:
        line = {
            "version": checkpoint.version,
            "step": checkpoint.step,
            "outcome": outcome,
            "time": time.time(),
            "seconds": round(time.monotonic() - started, 4),
            **details,
        }
        json_files.append_line(self._record, line)
