"""The runtime's environment as it is on a computer where a run has been before: its imports are compiled.

Machines of the test cloud and local runs use one environment; machines see it copy-on-write, so that each
would compile vLLM and torch anew, half a minute of computing every time. Neighbours: `environment.py` has the
environment that tests themselves run in.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

from launcher.base.home import Home
from runtime import bootstrap
from tests.support.environment import REPOSITORY

_FIRST_RUN_SECONDS = 600


@functools.cache
def warm_environment() -> Path:
    """The Python of the environment that runs use; built, and one run was there, where that was not so."""
    python = bootstrap.ensure_environment(Home.find().environments, "cpu")
    environment = python.parent.parent
    cache = Path(platformdirs.user_cache_dir("slipway-tests", appauthor=False))
    cache.mkdir(parents=True, exist_ok=True)
    marker = cache / f"warm-{environment.name}"
    built = str((environment / bootstrap.MARKER).stat().st_ino)
    with marker.open("a+") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.seek(0)
        if mark.read() != built:
            _run_once()
            mark.truncate(0)
            mark.write(built)
    return python


def _run_once() -> None:
    """A run of a program that does nothing: gateway, engine and trainer start."""
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "cache").symlink_to(Home.find().cache, target_is_directory=True)
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(
            [sys.executable, "-m", "launcher.cli.main", "--plain", "--", "true"],
            cwd=REPOSITORY,
            env=environ | {"LAUNCH_HOME": home},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_FIRST_RUN_SECONDS,
        )
