"""Arbor's names, for programs that were written for it: `from launcher.client import arbor` is all.

Each name has its Arbor meaning on the run that `launch` started: nothing of it starts or ends a
machine. Under `launch --arbor` the folder `on_path` is on the program's path, and `import arbor` is this too.
DSPy is imported when one of the names that need it is touched, never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from launcher.client.arbor.job_watching import shutdown_job, watch_job
from launcher.client.arbor.server import get_client, init, shutdown, start, start_server, status, stop

if TYPE_CHECKING:
    from launcher.client.arbor.arbor_provider import ArborProvider
    from launcher.client.arbor.optimizer import ArborGRPO

# The version of Arbor that these names are from, with our mark.
__version__ = "0.2.17+slipway"

__all__ = [
    "ArborGRPO",
    "ArborProvider",
    "__version__",
    "get_client",
    "init",
    "shutdown",
    "shutdown_job",
    "start",
    "start_server",
    "status",
    "stop",
    "watch_job",
]

_NEED_DSPY = {"ArborGRPO": "optimizer", "ArborProvider": "arbor_provider"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_DSPY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_DSPY[name]}"), name)
