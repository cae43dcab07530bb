"""Finds a run by its name from a program that `launch` did not start: a notebook, another terminal's script.

Neighbours: `session.py` asks when `connect` is given a name; `launch env` knows the run's address, and is
called as a command, because the client imports nothing that manages runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.module_command import module_command
from launcher.client.failures import NotConnected
from launcher.client.wire import PATIENCE_VARIABLE, Endpoint, Patience

LAUNCH_COMMAND = tuple(module_command("launcher.cli.main"))
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class FoundRun:
    """Where a named run answers, how patiently, and the folder that stays when it is over."""

    endpoint: Endpoint
    patience: Patience
    run_dir: Path


def find_run(run: str) -> FoundRun:
    """The run with this name or id, as soon as it has its endpoint. Raises NotConnected."""
    done = subprocess.run(
        [*LAUNCH_COMMAND, "env", run, "--wait", "--json"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "LAUNCH_FAILPOINT"},
    )
    answer = _last_json_object(done.stdout)
    if done.returncode and not answer:  # not a word of ours: `launch` itself is not there
        raise NotConnected(
            f"The Python of this program cannot ask `launch` for the run {run!r}",
            why=done.stderr.strip()[-_MAX_REASON_CHARACTERS:] or None,
            hint=f'eval "$(launch env {run})"  # in its shell, and then connect() without a name',
        )
    if done.returncode or "base_url" not in answer:
        error = answer.get("error") or {}
        raise NotConnected(
            f"There is no run {run!r} to connect to",
            why=error.get("why") or error.get("message") or done.stderr.strip() or None,
            hint=error.get("hint") or "launch status",
        )
    try:
        key = Path(answer["api_key_file"]).read_text().strip()
    except OSError as ended:
        raise NotConnected(f"The run {run!r} has ended", why=str(ended), hint="launch status") from None
    root = str(answer["base_url"]).removesuffix("/v1")
    patience = Patience.of_run({PATIENCE_VARIABLE: str(answer["patience_seconds"])})
    return FoundRun(Endpoint(root, key), patience, Path(answer["run_dir"]))


def _last_json_object(text: str) -> dict[str, Any]:
    """The last object that was printed."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
