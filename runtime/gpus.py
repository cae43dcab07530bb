"""Assigns the machine's GPUs to the children of the runtime.

Neighbours: `__main__.py` gives each child its own, through CUDA's variable; a name in it, a number or a UUID,
is passed on as it is. Knows nothing of CUDA itself.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """The GPUs this process may use, as CUDA names them: of a list, those before the first that is none."""
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def assign_gpus(gpus: list[str], train_processes: int, engines: int) -> tuple[list[str], list[list[str]]]:
    """The trainer's, and each engine's one: apart if there are enough, else shared from the first on."""
    if not gpus:
        return [], [[] for _ in range(engines)]
    return gpus[:train_processes], [[gpus[(train_processes + index) % len(gpus)]] for index in range(engines)]
