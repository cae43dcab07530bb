"""The tiny player of the examples' games, made once by its script and kept in the user's cache.

Neighbours: `warm.py` has the environment it is made in.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
from pathlib import Path

from examples.tiny_model import players
from launcher.base.home import Home
from tests.support.environment import REPOSITORY
from tests.support.warm import warm_environment

_SECONDS = 600


@functools.cache
def player_folder() -> Path:
    """Its folder, named after what decides its content."""
    cache = Home.find().cache / "players"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / players.digest()
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not players.is_made(folder):
            subprocess.run(
                [str(warm_environment()), "-m", "examples.tiny_model.players", "--out", str(folder)],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=_SECONDS,
            )
    return folder
