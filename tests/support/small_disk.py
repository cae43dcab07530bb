"""A program of ours on a real file system of 512 KiB, where this user may mount one.

Neighbours: the programs in `tests/programs/unit`, which fill it and print what they saw as their last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import PROGRAMS, REPOSITORY

_MOUNT = 'mount -t tmpfs -o size=512k none "$1" && exec "$2" "$3" "$1"'


def said_on_small_disk(program: str, folder: Path) -> Any:
    """What a program of `tests/programs/unit` printed last, as JSON; this folder is the disk it is told of.

    Skips the test where nothing may be mounted.
    """
    words = [sys.executable, PROGRAMS / "unit" / program]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", folder, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
