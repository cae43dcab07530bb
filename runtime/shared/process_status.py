"""The status of the other processes, for `/slipway/status` and for errors that explain.

Neighbours: reads `supervisor.json` (the supervisor's) and `keeper`'s lease file; engine_pool.py and steps ask
it whether a child has failed for good. Writes only the lease's time stamp.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from runtime.shared import json_files
from runtime.shared.statuses import ChildState

# The supervisor touches its file every few seconds (supervision.py).
STALLED_SECONDS = 20.0


class SupervisorStatus:
    """The supervisor's status, read again only when its file changes."""

    def __init__(self, state_dir: Path, lease_seconds: float) -> None:
        self._state_dir = state_dir
        self._lease_seconds = lease_seconds
        self._stamp: int | None = None
        self._changed_at = time.monotonic()
        self._status: dict[str, Any] = {}

    def supervisor(self) -> dict[str, Any]:
        """`supervisor.json`; empty when the gateway runs without a supervisor."""
        path = self._state_dir / "supervisor.json"
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if stamp != self._stamp:
            self._status = json_files.read_json(path) or {}
            self._stamp = stamp
            self._changed_at = time.monotonic()
        return self._status

    def silence(self) -> str | None:
        """The warning about a frozen supervisor: its children are unattended."""
        status = self.supervisor()
        seconds = time.monotonic() - self._changed_at
        if not status or seconds < STALLED_SECONDS:
            return None
        return f"the supervisor has been silent for {seconds:.0f} s"

    def children(self) -> list[ChildState]:
        """The children's states, in the supervisor's order."""
        return [ChildState.model_validate(child) for child in self.supervisor().get("children", [])]

    def child(self, name: str) -> dict[str, Any]:
        """One child's state as written; empty when nothing is known of it."""
        return next((child for child in self.supervisor().get("children", []) if child["name"] == name), {})

    def renew_lease(self) -> float:
        """Touch the lease file; the seconds it now has left."""
        path = self._state_dir / "lease"
        path.touch()
        os.utime(path)
        return self._lease_seconds

    def lease_left_seconds(self) -> float | None:
        """The seconds left by the file's time; the keeper's clock decides. None before a first renewal."""
        try:
            renewed = (self._state_dir / "lease").stat().st_mtime
        except FileNotFoundError:
            return None
        return self._lease_seconds - (time.time() - renewed)
