"""Reads Trackio's files as its dashboard does, in a Python of its own: TRACKIO_DIR is read at import.

python -m tests.support.trackio_files PROJECT      (as JSON)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.environment import REPOSITORY


def runs_in(folder: Path, project: str = "slipway") -> dict[str, dict[str, Any]]:
    """By id, each run's name, config, and rows."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.trackio_files", project],
        cwd=REPOSITORY,
        env={**os.environ, "TRACKIO_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _read(project: str) -> dict[str, dict[str, Any]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    return {
        run.id: {
            "name": run.name,
            "config": run.config,
            "rows": SQLiteStorage.get_logs(project, run.name, run_id=run.id),
        }
        for run in trackio.Api().runs(project)
    }


if __name__ == "__main__":
    print(json.dumps(_read(sys.argv[1]), default=str))
