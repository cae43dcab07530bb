"""Reloads a version that a request names and no engine has any more, and verifies it again.

Only a version's own weights answer under its name (C55): the checkpoint is read whole, its adapter must be
the one that was published under the name, and the engines are verified as at a publication. Neighbours:
engine_pool.py asks before it gives out an engine; version_check.py verifies; versions.py knows the versions
that there is room for. A version's first return is a line in `publications.jsonl`, each in the log: programs
that name more versions than there is room for bring them back at every request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_check import AdapterVerifier
from runtime.gateway.versions.versions import Versions
from runtime.shared import json_files
from runtime.shared.checkpoint import Checkpoint, CheckpointError, CheckpointStore, checkpoint_name

log = logging.getLogger(__name__)


class OnDemandReload:
    """Brings versions back, one at a time. The gateway's event loop is its only user."""

    def __init__(
        self, verifier: AdapterVerifier, versions: Versions, checkpoints: CheckpointStore, record: Path
    ) -> None:
        """`record`: publications.jsonl."""
        self._verifier = verifier
        self._versions = versions
        self._checkpoints = checkpoints
        self._record = record
        # Held while versions are loaded or unloaded, so that none goes while it comes.
        self.lock = asyncio.Lock()
        self._coming: dict[int, asyncio.Task[None]] = {}
        # Versions whose return this process has recorded.
        self._recorded: set[int] = set()

    async def __call__(self, version: int, engines: list[EngineClient]) -> bool:
        """Load the version on these engines. Returns whether that took any time.

        It finishes even if its client leaves meanwhile: a half-loaded version would stay on the engines
        uncounted, and clients with less patience than it takes would never get it. Raises ApiError if it
        cannot be loaded or must wait, VerificationError if it is not verified.
        """
        if self._versions.is_loaded(version):
            return False
        coming = self._coming.get(version)
        if coming is None:
            coming = self._coming[version] = asyncio.create_task(self._reload(version, engines))
            coming.add_done_callback(lambda ended: self._record_reload(version, ended))
        await asyncio.shield(coming)
        return True

    async def _reload(self, version: int, engines: list[EngineClient]) -> None:
        async with self.lock:
            if not self._versions.is_loaded(version):  # while we waited
                await self._load_and_verify(version, engines)

    def _record_reload(self, version: int, ended: asyncio.Task[None]) -> None:
        del self._coming[version]
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.warning("%s did not come back: %s", self._versions.named(version), error)

    async def _load_and_verify(self, version: int, engines: list[EngineClient]) -> None:
        started = time.time()
        checkpoint = await self._checkpoint(version)
        if (old := self._versions.make_room()) is not None:
            log.info(
                "%s is unloaded to make room: a request that names it loads it again",
                self._versions.named(old),
            )
            await self._verifier.unload(old)
        proof = asdict(await self._verifier.verify_on(engines, checkpoint))
        self._versions.mark_reloaded(version)
        log.info("%s is loaded again, and proven", self._versions.named(version))
        if version not in self._recorded:
            self._recorded.add(version)
            self._write({"step": checkpoint.step, "outcome": "recalled", "time": started, **proof})

    def _write(self, line: dict[str, Any]) -> None:
        """For the record only: a full disk keeps no version from answering."""
        try:
            json_files.append_line(self._record, line)
        except OSError as error:
            log.warning("not written to %s: %s: %s", self._record.name, error, line)

    async def _checkpoint(self, version: int) -> Checkpoint:
        """The version's checkpoint, every byte of it as committed and as published. Raises ApiError(404)."""
        try:
            checkpoint = await asyncio.to_thread(self._checkpoints.load, checkpoint_name(version))
        except CheckpointError as error:
            why = f"was served once, but its saved weights are incomplete ({error})"
            raise self._versions.gone(version, why) from error
        published = None
        # A reused number's name has its weights' hash, and the record's line may be of the lost machine's.
        if not self._versions.is_reused(version):
            published = await asyncio.to_thread(_published_sha256, self._record, version)
        if checkpoint.version != version or published not in (None, checkpoint.adapter_sha256):
            raise self._versions.gone(version, "was served once, but different weights are saved now")
        return checkpoint


def _published_sha256(record: Path, version: int) -> str | None:
    """The hash of the adapter that was last published under the version's name; None if no line has it.

    The last one, because a run that lost its machine went back, and published versions of these numbers once
    more.
    """
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:  # cut by a power loss
            continue
        if isinstance(entry, dict) and (entry.get("version"), entry.get("outcome")) == (version, "published"):
            return entry.get("sha256")
    return None
