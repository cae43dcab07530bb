"""A job of the run's `/v1/fine_tuning/jobs`, begun by `client.fine_tuning.jobs.create(…)` of OpenAI's SDK.

Neighbour: `job_watching.py` follows and cancels it by its id. Knows nothing of the job's training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from launcher.client.connection import Connection
from launcher.client.request_bodies import REQUEST_HEADER
from launcher.client.wire import new_request_id

_MAX_EVENTS = 100


@dataclass
class FineTuningJob:
    """`entries` has each event once, the oldest first."""

    connection: Connection
    job_id: str
    _events: dict[str, dict[str, Any]] = field(default_factory=dict)

    def is_known(self) -> bool:
        """Whether the run has a job of this id."""
        return self._request("GET") is not None

    def status(self) -> str:
        """The status in OpenAI's words."""
        return str((self._request("GET") or {}).get("status", "unknown"))

    def entries(self) -> Sequence[dict[str, Any]]:
        found = self._request("GET", f"/events?limit={_MAX_EVENTS}") or {}
        for event in reversed(found.get("data", [])):
            self._events.setdefault(event["id"], {"kind": "event", "text": event["message"]})
        return list(self._events.values())

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def cancel(self) -> str:
        """Have it take no more steps; its status then."""
        return str((self._request("POST", "/cancel") or {}).get("status") or self.status())

    def _request(self, method: str, suffix: str = "") -> dict[str, Any] | None:
        path = f"/v1/fine_tuning/jobs/{quote(self.job_id, safe=':')}{suffix}"
        answer = self.connection.wire.send(method, path, None, {REQUEST_HEADER: new_request_id()})
        return None if answer.is_error else answer.json()
