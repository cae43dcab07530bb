"""Keeps responses, so that a later request may go on from one by `previous_response_id`.

    STATE/responses/ID.json     {"response", "given", "answer", "previous"}

A conversation is a chain of such files: each has the messages of its own request and answer. The oldest are
removed once there are too many. Neighbours: responses.py writes and reads them. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from runtime.gateway.dialects.responses_request import ITEM_ID

_ID = re.compile(r"resp_[\w-]{1,160}", re.ASCII)
_MAX_RESPONSES = 50_000
_MAX_BYTES = 1 << 30


class StoredResponse(msgspec.Struct):
    """One response with the messages of its own turn."""

    response: dict[str, Any]
    given: list[dict[str, Any]]
    answer: dict[str, Any]
    previous: str | None = None


class ResponseStore:
    """Written from one thread, read from any."""

    def __init__(self, folder: Path, most: int = _MAX_RESPONSES, most_bytes: int = _MAX_BYTES) -> None:
        self._folder = folder
        self._most = most
        self._most_bytes = most_bytes
        for partial in folder.glob("*.partial"):  # of a process that was killed
            partial.unlink()
        found = [(path.stat(), path.stem) for path in folder.glob("resp_*.json")]
        # The oldest first; each with its size.
        self._sizes = OrderedDict(
            (name, stat.st_size) for stat, name in sorted(found, key=lambda it: it[0].st_mtime_ns)
        )
        self._bytes = sum(self._sizes.values())

    def put(self, name: str, stored: StoredResponse) -> None:
        """Keep one; the same again changes nothing. Raises OSError."""
        path = self._folder / f"{name}.json"
        partial = path.with_suffix(".partial")
        content = msgspec.json.encode(stored)
        self._folder.mkdir(exist_ok=True)
        partial.write_bytes(content)
        partial.rename(path)
        self._bytes += len(content) - self._sizes.pop(name, 0)
        self._sizes[name] = len(content)
        while len(self._sizes) > self._most or (self._bytes > self._most_bytes and len(self._sizes) > 1):
            self.delete(next(iter(self._sizes)))

    def get(self, name: str) -> StoredResponse | None:
        """One by its id; None if it is not, or no longer, there."""
        if not _ID.fullmatch(name):
            return None
        try:
            return msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=StoredResponse)
        except (OSError, msgspec.MsgspecError):
            return None

    def item(self, name: str) -> dict[str, Any] | None:
        """An item of a kept response's output by its id, which is made of the response's."""
        found = ITEM_ID.fullmatch(name)
        stored = None if found is None else self.get(f"resp_{found[1]}")
        items = () if stored is None else stored.response["output"]
        return next((item for item in items if item["id"] == name), None)

    def delete(self, name: str) -> bool:
        """Forget one; False if there is none."""
        size = self._sizes.pop(name, None)
        if size is None:
            return False
        self._bytes -= size
        with contextlib.suppress(OSError):
            (self._folder / f"{name}.json").unlink()
        return True

    def conversation(self, name: str) -> list[dict[str, Any]] | None:
        """The messages up to and with a response's answer; None if one of its chain is not there."""
        turns: list[StoredResponse] = []
        seen: set[str] = set()
        at: str | None = name
        while at is not None:
            found = None if at in seen else self.get(at)
            if found is None:
                return None
            seen.add(at)
            turns.append(found)
            at = found.previous
        return [message for turn in reversed(turns) for message in (*turn.given, turn.answer)]
