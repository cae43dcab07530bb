"""A version that a request names and no engine has any more: loaded again, and proven again.

What answers under a version's name are that version's weights or nothing (C55): the checkpoint is read
whole, its adapter must be the one that was published under the name, and the engines prove it as they do at
a publication. Neighbours: fleet.py asks before it gives out an engine; publication.py proves; versions.py
says for which versions there is room. Every version that comes back is a line in `publications.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime import files
from runtime.serving.engine_client import EngineClient
from runtime.serving.publication import Publisher
from runtime.serving.versions import Versions
from runtime.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore, checkpoint_name

log = logging.getLogger(__name__)


class Recall:
    """Brings versions back, one at a time. The gateway's event loop is its only user."""

    def __init__(
        self, publisher: Publisher, versions: Versions, checkpoints: CheckpointStore, record: Path
    ) -> None:
        """`record`: publications.jsonl."""
        self._publisher = publisher
        self._versions = versions
        self._checkpoints = checkpoints
        self._record = record
        # Held while versions are loaded or unloaded, so that none goes while it comes.
        self.lock = asyncio.Lock()

    async def __call__(self, version: int, engines: list[EngineClient]) -> bool:
        """Have the version on these engines; whether that took any time.

        Raises ApiError where it cannot come back or must wait, PublicationError where it is not proven.
        """
        if self._versions.is_loaded(version):
            return False
        async with self.lock:
            if not self._versions.is_loaded(version):  # while we waited
                await self._bring(version, engines)
        return True

    async def _bring(self, version: int, engines: list[EngineClient]) -> None:
        started = time.time()
        checkpoint = await self._checkpoint(version)
        if (old := self._versions.make_room()) is not None:
            log.info("%s is unloaded to make room: it comes back when named", self._versions.named(old))
            await self._publisher.unload(old)
        proof = asdict(await self._publisher.recall(engines, checkpoint))
        self._versions.recalled(version)
        self._write({"step": checkpoint.step, "outcome": "recalled", "time": started, **proof})

    def _write(self, line: dict[str, Any]) -> None:
        """For the record only: a full disk keeps no version from answering."""
        try:
            files.append_line(self._record, line)
        except OSError as error:
            log.warning("not written to %s: %s: %s", self._record.name, error, line)

    async def _checkpoint(self, version: int) -> Checkpoint:
        """The version's checkpoint, every byte of it as committed and as published. Raises ApiError(404)."""
        try:
            checkpoint = await asyncio.to_thread(self._checkpoints.load, checkpoint_name(version))
        except CheckpointError as error:
            why = f"was served once, and what is kept of it is not whole ({error})"
            raise self._versions.gone(version, why) from error
        published = await asyncio.to_thread(_published_sha256, self._record, version)
        if checkpoint.version != version or published not in (None, checkpoint.adapter_sha256):
            raise self._versions.gone(version, "was served once, and what is kept are other weights")
        return checkpoint


def _published_sha256(record: Path, version: int) -> str | None:
    """The hash of the adapter that was served under the version's name; None where nobody wrote it.

    The last word: a machine that was lost may have served another under the same number.
    """
    sha256 = None
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # cut by a power loss
            continue
        if said.get("version") == version and said.get("outcome") == "published":
            sha256 = said.get("sha256")
    return sha256
