"""The process that writes a run into Trackio: started with the run, ended after the last copy of its results.

Trackio's files are in `results/trackio`, or in the user's TRACKIO_DIR. The process listens nowhere, asks no
network and has no secret; if `launch` dies its stdin ends, and so does it. Neighbours: `run/` and `teardown/`
start it, `trackio_log.py` is the process. Imports no trackio.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.base.credentials import is_secret_name
from launcher.base.errors import NotPulled, PreflightError, described
from launcher.base.module_command import module_command
from launcher.records.endpoint import RESULTS
from launcher.records.records import RunRecord

LOG = "trackio.log"
FOLDER = "trackio"
# Its storage is not public: pyproject.toml names the same version.
_PACKAGE, _VERSION = "trackio", "0.43"
_DIRECTORY = "TRACKIO_DIR"
# Trackio's import, and the wait for another process's lock on its file.
_FINISH_SECONDS = 30.0


class TrackioProcess:
    """Follows the run of this folder until `finish`, or until this process is gone."""

    def __init__(self, run: Path) -> None:
        self._log = run / LOG
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                [*module_command("launcher.results.trackio_log"), str(run)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environ(os.environ, run / RESULTS),
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


def write(record: RunRecord, note: Callable[[str], None]) -> None:
    """Have the run in Trackio as it is at home, if it logs there; `note` gets the reason if that fails."""
    if not record.logs_to_trackio:
        return
    try:
        TrackioProcess(record.folder).finish()
    except Exception as error:  # noqa: BLE001 - it may hold up no end of a run
        note(described(error))


def view_command(results: Path, project: str, environ: Mapping[str, str]) -> str:
    """The command that shows the run."""
    where = "" if environ.get(_DIRECTORY) else f"{_DIRECTORY}={shlex.quote(str(results / FOLDER))} "
    return f"{where}trackio show --project {shlex.quote(project)}"


def check_installed() -> None:
    """Raises PreflightError without the version whose storage is known."""
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


def _environ(environ: Mapping[str, str], results: Path) -> dict[str, str]:
    """No secret, and of Trackio's variables only its folder: the others name services."""
    kept = {
        name: value
        for name, value in environ.items()
        if not is_secret_name(name) and not name.startswith("TRACKIO_")
    }
    return kept | {_DIRECTORY: os.path.abspath(environ.get(_DIRECTORY) or results / FOLDER)}
