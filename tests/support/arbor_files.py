"""The two files of Arbor that its DSPy users run, as they were published: fetched once, loaded by their path.

The package itself wants what trains on GPUs; these two want dspy, openai and requests. They are no part of
this repository.
"""

from __future__ import annotations

import fcntl
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

PACKAGE, VERSION = "arbor-ai", "0.2.17"
FILES = ("arbor_provider.py", "grpo_optimizer.py")
_SECONDS = 300


@functools.cache
def arbor_files() -> Path:
    """The folder that has them, in the tests' cache."""
    cache = Path(platformdirs.user_cache_dir("slipway-tests", appauthor=False))
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / f"{PACKAGE}-{VERSION}"
    with (cache / f"{PACKAGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as fresh:
                _fetch(Path(fresh) / "whole")
                (Path(fresh) / "whole").rename(place)
    folder = place / "arbor" / "integrations" / "dspy"
    assert all((folder / name).is_file() for name in FILES), folder
    return folder


def _fetch(into: Path) -> None:
    command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", into]
    subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=True, timeout=_SECONDS)
