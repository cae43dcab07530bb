"""Checks that this computer can run a bench, and builds the environment before anything is timed.

Neighbours: `self_bench.py` calls it. Knows nothing of the measurements.
"""

from __future__ import annotations

import importlib.util

from launcher.base import disk
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.config import preflight
from launcher.console.output import Output
from runtime import bootstrap

# A run's checkpoints, samples and logs are some 30 MB.
_RUN_BYTES = 10**9


def refuse_unable_computer(home: Home) -> None:
    """Raises PreflightError, before anything is built or started."""
    preflight.check_platform()
    if importlib.util.find_spec("dspy") is None:
        raise PreflightError(
            "a bench needs DSPy",
            "it trains a DSPy program",
            "pip install 'slipway-rl[dspy]'",
        )
    preflight.check_runtime_environment(home)
    if trouble := disk.why_unwritable(home.data):
        raise PreflightError(f"cannot write {home.data}", trouble, f"ls -ld {home.data}")
    if (free := disk.free_bytes(home.data)) < _RUN_BYTES:
        raise PreflightError(
            f"a bench needs {disk.format_bytes(_RUN_BYTES)} of disk for its runs",
            f"{disk.format_bytes(free)} are free at {home.data}",
            f"df -h {home.data}",
        )


def build_environment(home: Home, output: Output) -> None:
    """Build the runtime's environment if it is missing: that is no part of a timed start."""
    try:
        with output.busy("building the runtime's environment", "once") as progress:
            bootstrap.ensure_environment(home.environments, "cpu", progress=progress)
    except bootstrap.BootstrapError as error:
        raise PreflightError(
            "the runtime's environment could not be built",
            str(error),
            "check the network and the disk, then run the same command again",
        ) from error
