"""The module that `import arbor` finds under `launch --arbor`: it has the names of `launcher.client.arbor`
alone.

`launch` puts the folder above this one on the program's path. If the real arbor-ai is installed too, this one
is used, and a line reports it once.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from launcher.client import arbor as _ours
from launcher.client.arbor import supplied_names as _supplied_names
from launcher.client.arbor.stderr_log import log_once


def __getattr__(name: str) -> Any:
    # Also `__all__`, which `from arbor import *` asks for.
    return getattr(_ours, name)


def _say_whose() -> None:
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != here.parent]
    found = PathFinder.find_spec("arbor", others)
    if found is not None and found.origin and Path(found.origin).resolve().parent != here:
        log_once(f"`import arbor` is Slipway's under launch --arbor; {found.origin} is not used")


_say_whose()
_supplied_names.install()
