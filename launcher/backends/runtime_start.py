"""Waits for a runtime to start: shows the state of its children, and fails early when one cannot start.

Neighbours: `local_machine.py` started the keeper and knows the folder. Reads `supervisor.json`, `keeper.json`
and logs, and asks the gateway. Knows nothing of how the processes were started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.base.errors import NotStarted, PreflightError
from launcher.base.unix_http import get_json
from launcher.models import model_size
from launcher.types.machine import Progress
from runtime.shared.log_errors import LINES, final_error, strip_log_prefix, tail

# Time for engines and trainer to start, with any model; and for a model that is downloaded over a slow line
# and perhaps read from a slow disk as well.
MIN_START_SECONDS = 1800.0
_SLOWEST_BYTES_PER_SECOND = 8e6
# A child that ended twice before the first start was complete would end a third time.
MAX_RESTARTS = 1
# The keeper's words for why it ended the runtime.
_REASONS = {
    "lease": "its lease was not renewed",
    "deadline": "its deadline was reached",
    "signal": "it was told to end",
    "supervisor exited": "its supervisor ended",
}
_POLL_SECONDS = 0.2
_LOG_BYTES = 8192


def start_seconds(model_path: str, model_bytes: int | None = None) -> float:
    """The bound on a runtime's start, by the size of its model: as given, or by the files or the name of
    `model_path`."""
    size = (
        model_bytes
        or model_size.folder_weights_bytes(Path(model_path))
        or model_size.bytes_by_name(model_path)
        or 0
    )
    return MIN_START_SECONDS + size / _SLOWEST_BYTES_PER_SECOND


class RuntimeStart:
    """The start of one run's runtime, seen from its folder."""

    def __init__(self, run_id: str, state_dir: Path, gateway: Path, progress: Progress) -> None:
        self._run_id = run_id
        self._state_dir = state_dir
        self._gateway = gateway
        self._progress = progress
        self._told: dict[str, str] = {}

    def wait(self, token: str, keeper_code: Callable[[], int | None], bound_seconds: float) -> None:
        """Wait until the gateway reports that everything is ready. Renews the lease meanwhile.

        `keeper_code` is the keeper's exit code once it has ended. Raises NotStarted; PreflightError for a
        model that engine and trainer disagree on.
        """
        bound = time.monotonic() + bound_seconds
        while True:
            (self._state_dir / "lease").touch()
            self._follow_children()
            if self._ready(token):
                return
            code = keeper_code()
            if code is not None:
                raise self._ended(code)
            if time.monotonic() > bound:
                raise self._failed(f"the runtime was not ready after {bound_seconds:.0f} s", self._slowest())
            time.sleep(_POLL_SECONDS)

    def _ready(self, token: str) -> bool:
        try:
            if get_json(self._gateway, "/healthz")[0] != 200:
                return False
            status, body = get_json(self._gateway, "/slipway/status", token)
        except OSError:
            return False
        if status != 200 or not isinstance(body, dict):
            return False
        self._check_admitted(body)
        return body.get("phase") == "ready"

    def _check_admitted(self, status: dict[str, Any]) -> None:
        """Raise PreflightError if engine and trainer were seen to disagree on the model (C58)."""
        found = status.get("admission") or {}
        if found.get("admitted") is False:
            raise PreflightError(
                f"{found.get('model')} is refused: it could not be trained as it is served",
                found.get("reason"),
                f"launch status {self._run_id}",
            )

    def _follow_children(self) -> None:
        for child in self._children():
            name, state = child["name"], child["state"]
            if self._told.get(name) != state:
                self._told[name] = state
                self._progress(f"{name}: {state}")
            if state == "failed" or child["restarts"] > MAX_RESTARTS:
                raise self._failed(f"the runtime's {name} did not start", name)

    def _children(self) -> list[dict[str, Any]]:
        try:
            status = json.loads((self._state_dir / "supervisor.json").read_text())
        except (FileNotFoundError, ValueError):
            return []
        return status["children"]

    def _slowest(self) -> str:
        """The child that is not ready, or the supervisor if it started none."""
        return next((c["name"] for c in self._children() if c["state"] != "ready"), "supervisor")

    def _ended(self, code: int) -> NotStarted:
        if not (self._state_dir / "keeper.json").exists():
            return self._failed(f"the runtime's keeper ended at once with code {code}", "keeper")
        reason = reason_of_end(self._state_dir)
        return self._failed(f"the runtime ended while it started: {reason}", "supervisor")

    def _failed(self, message: str, name: str) -> NotStarted:
        """The error with the log up to its last error; the very last line is the reason."""
        lines = final_error(self._state_dir / "logs" / f"{name}.log")
        why = strip_log_prefix(lines[-1]) if lines else f"its log, {name}.log, is empty"
        hint = f"launch logs {self._run_id} --which {name}"
        return NotStarted(message, why, hint, last_lines=[f"{name}: {line}" for line in lines])


def reason_of_end(state_dir: Path) -> str:
    """The keeper's recorded reason for ending the runtime, in words."""
    try:
        reason = json.loads((state_dir / "keeper.json").read_text())["reason"]
    except (FileNotFoundError, ValueError, KeyError):
        reason = ""
    return _REASONS.get(str(reason), "its keeper was killed")


def last_lines(log: Path) -> list[str]:
    """The end of a log, empty lines left out; nothing when there is no log."""
    return tail(log, _LOG_BYTES)[-LINES:]
