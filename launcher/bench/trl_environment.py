"""TRL's environment: built apart from pinned files, once, among those that `launch` keeps.

Neighbours: `runtime/bootstrap.py` builds it as it builds the runtime's, by what uv reads here (such as
UV_FIND_LINKS); `launch gc` knows its name by `machines/environments.py`. Knows nothing of what is run in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.machines import environments
from runtime import bootstrap

VARIANT = environments.COMPARED_VARIANT
REQUIREMENTS = environments.COMPARED_REQUIREMENTS
# 1.2 GB installed, the archives beside it.
NEEDED_BYTES = 4 * 10**9


def check(home: Home) -> None:
    """It is there, or can be built: disk, and a package index that answers. Raises PreflightError."""
    if _environment(home).whole():
        return
    free = disk.free_bytes(home.environments)
    if free < NEEDED_BYTES:
        raise PreflightError(
            f"TRL's environment needs {disk.in_units(NEEDED_BYTES)} of disk",
            f"{disk.in_units(free)} are free at {home.environments}",
            "free some space, or set LAUNCH_HOME to a folder on a larger disk",
        )
    try:
        trouble = environments.unreachable(VARIANT, requirements=REQUIREMENTS)
    except bootstrap.BootstrapError as error:
        raise PreflightError("TRL's environment cannot be built", str(error), "pip install uv") from None
    if trouble:
        raise PreflightError(
            "TRL's environment is not built, and its packages cannot be downloaded",
            trouble.splitlines()[0],
            "launch bench  # without --against: our side alone, which needs no network",
        )


def python_of(home: Home, progress: Callable[[str], None]) -> Path:
    """Its Python, built first where it is missing. Raises PreflightError."""
    try:
        return bootstrap.ensure_environment(
            home.environments, VARIANT, progress=progress, requirements=REQUIREMENTS
        )
    except bootstrap.BootstrapError as error:
        raise PreflightError(
            "TRL's environment could not be built",
            str(error),
            "check the network and the disk, then run the same command again",
        ) from error


def _environment(home: Home) -> bootstrap.Environment:
    return bootstrap.Environment(home.environments.absolute(), VARIANT, (), REQUIREMENTS)
