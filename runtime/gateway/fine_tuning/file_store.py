"""The files of OpenAI's `/v1/files`, on the machine's disk: uploaded to learn from, or the results of a job.

    files/file-….data    the bytes as they came
    files/file-….json    their description; written last, removed first: a file exists while this does

Neighbours: `routes.py` asks; `conversations.py` reads their content. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared import json_files

FINE_TUNE = "fine-tune"
RESULTS = "fine-tune-results"
# Of all files together; one file is bounded by the size of a request.
MAX_BYTES = 2 * 2**30
MAX_FILES = 2048
_ID = re.compile(r"file-[0-9a-f]{24}")
_MAX_NAME_LENGTH = 255


@dataclass(frozen=True)
class StoredFile:
    """A file, in the form of OpenAI's API."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileStore:
    """All files of the run. The gateway's event loop is its only user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, StoredFile] = {}
        self._adding = asyncio.Lock()
        for path in sorted(folder.glob("file-*.json")):
            stored = json_files.read_json(path)
            if isinstance(stored, dict):
                self._files[stored["id"]] = StoredFile(**stored)
        for path in folder.glob("file-*.data"):
            if path.stem not in self._files:  # the end came between its two files
                path.unlink(missing_ok=True)

    async def add(self, content: bytes, filename: str, purpose: str) -> StoredFile:
        """Keep a file. Raises ApiError if there is no room for files, OSError if the disk is full."""
        async with self._adding:
            one = self._named(len(content), filename, purpose)
            await asyncio.to_thread(self._write, one, content)
            self._files[one.id] = one
        return one

    def _named(self, size: int, filename: str, purpose: str) -> StoredFile:
        """The description of a file. Raises ApiError if there is no room."""
        total = sum(one.bytes for one in self._files.values()) + size
        if total > MAX_BYTES or len(self._files) >= MAX_FILES:
            raise ApiError(413, "the run has the maximum number of files: delete some", code="too_many_files")
        name = Path(filename.replace("\\", "/")).name[:_MAX_NAME_LENGTH] or "file"
        # Ids are in the order of their making.
        file_id = f"file-{time.time_ns():016x}{uuid.uuid4().hex[:8]}"
        return StoredFile(file_id, size, int(time.time()), name, purpose)

    def _write(self, one: StoredFile, content: bytes) -> None:
        """Raises OSError, and then leaves nothing."""
        try:
            (self._folder / f"{one.id}.data").write_bytes(content)
            json_files.fsync(self._folder / f"{one.id}.data")
            json_files.write_json(self._folder / f"{one.id}.json", asdict(one), durable=True)
        except OSError:
            (self._folder / f"{one.id}.data").unlink(missing_ok=True)
            raise

    def list(self) -> Sequence[StoredFile]:
        """All of them, the newest first."""
        return sorted(self._files.values(), key=lambda one: one.id, reverse=True)

    def get(self, file_id: str) -> StoredFile:
        """A file's description. Raises ApiError(404)."""
        if not _ID.fullmatch(file_id) or file_id not in self._files:
            raise ApiError(404, "there is no such file", param="file_id", code="not_found")
        return self._files[file_id]

    def path(self, file_id: str) -> Path:
        """The path of its bytes. Raises ApiError(404)."""
        return self._folder / f"{self.get(file_id).id}.data"

    def remove(self, file_id: str) -> None:
        """Forget a file. Raises ApiError(404)."""
        one = self.get(file_id)
        (self._folder / f"{one.id}.json").unlink(missing_ok=True)
        (self._folder / f"{one.id}.data").unlink(missing_ok=True)
        del self._files[one.id]
