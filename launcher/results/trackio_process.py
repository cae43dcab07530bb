"""The process that writes a run into Trackio: started with the run, ended after its end is on record.

Trackio's files are in `results/trackio`, or in the TRACKIO_DIR that the user had when the run began. The
process listens nowhere, asks no network and has no secret; if `launch` dies its stdin ends, and so does it.
No machine waits for it. Neighbours: `run/`, the guardian, `launch down`, `gc` and `pull` start it,
`trackio_log.py` is the process. Imports no trackio.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.base.errors import NotPulled, PreflightError, described
from launcher.base.module_command import module_command
from launcher.records.endpoint import RESULTS
from launcher.records.records import RunRecord

_MODULE = "launcher.results.trackio_log"
LOG = "trackio.log"
FOLDER = "trackio"
# Its storage is not public: pyproject.toml names the same version.
_PACKAGE, _VERSION = "trackio", "0.43"
_DIRECTORY = "TRACKIO_DIR"
# Trackio's import, and the wait for another process's lock on its file.
_FINISH_SECONDS = 30.0
# What a Python needs; all else, such as a proxy with its password, stays here.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LAUNCH_HOME")


class TrackioProcess:
    """Follows this run until `finish`, or until this process is gone. Raises OSError."""

    def __init__(self, record: RunRecord) -> None:
        self._log = record.folder / LOG
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                [*module_command(_MODULE), str(record.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environ(os.environ, folder_of(record)),
                start_new_session=True,
            )

    def finish(self) -> None:
        """Have it write the rest. Raises NotPulled when Trackio may lack some."""
        assert self._popen.stdin is not None  # a pipe, as asked for
        self._popen.stdin.close()
        try:
            code = self._popen.wait(_FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            raise NotPulled("Trackio may lack steps", f"not done in {_FINISH_SECONDS:g} s", None) from None
        if code:
            lines = self._log.read_text(errors="replace").split("\n")
            why = next((line for line in reversed(lines) if line), f"exit code {code}")
            raise NotPulled("Trackio may lack steps", why, None)


def start(record: RunRecord, note: Callable[[str], None]) -> TrackioProcess | None:
    """For the time of the run; `note` gets the reason if that fails: no run ends for its log."""
    try:
        return TrackioProcess(record)
    except Exception as error:  # noqa: BLE001 - the run goes on
        note(f"nothing is written to Trackio: {described(error)}")
        return None


def write(record: RunRecord, note: Callable[[str], None]) -> None:
    """Have the run in Trackio as it is at home, if it logs there; `note` gets the reason if that fails."""
    if not record.logs_to_trackio:
        return
    try:
        TrackioProcess(record).finish()
    except Exception as error:  # noqa: BLE001 - it may hold up no end of a run
        note(described(error))


def details_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the record keeps: the user's folder, which another terminal, or the guardian, may not know."""
    folder = environ.get(_DIRECTORY)
    return {"trackio_dir": os.path.abspath(folder) if folder else None}


def folder_of(record: RunRecord) -> Path:
    """Trackio's files of this run."""
    return Path(record.details.get("trackio_dir") or record.folder / RESULTS / FOLDER)


def view_command(record: RunRecord, project: str) -> str:
    """The command that shows the run."""
    return f"{_DIRECTORY}={shlex.quote(str(folder_of(record)))} trackio show --project {shlex.quote(project)}"


def check(project: str) -> None:
    """Raises PreflightError without the version whose storage is known, or if the name is refused."""
    try:
        found = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or found.split(".")[:2] != _VERSION.split("."):
        raise PreflightError(
            f"--trackio needs Trackio {_VERSION}",
            f"{found} is installed" if found else "it is not installed in launch's environment",
            f"uv pip install --python {shlex.quote(sys.executable)} 'trackio=={_VERSION}.*'",
        )
    command = [*module_command(_MODULE), "--check", project]
    environ = _environ(os.environ, Path())
    try:
        checked = subprocess.run(
            command, capture_output=True, text=True, env=environ, timeout=_FINISH_SECONDS
        )
    except subprocess.TimeoutExpired:
        why = f"Trackio was not imported in {_FINISH_SECONDS:g} s"
        raise PreflightError("--trackio cannot be used", why, "--no-trackio") from None
    if checked.returncode:
        why = checked.stderr.strip().rpartition("\n")[2]
        hint = "--set wandb_project=NAME names it on both"
        raise PreflightError(f"Trackio does not take the project's name {project!r}", why, hint)


def _environ(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """No secret, and of Trackio's variables only its folder: the others name services."""
    kept = {name: environ[name] for name in _VARIABLES if name in environ}
    return kept | {_DIRECTORY: str(folder)}
