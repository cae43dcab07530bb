"""The other side of a comparison: TRL's own trainer in an environment of its own, and what it left.

Its environment is built apart from pinned files, once, in a folder of its own among those `launch` keeps.
Neighbours: `launcher/bench/child.py` runs it, `trl_program.py` is what it runs. Knows nothing of our side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.base.home import Home
from launcher.bench import child, slipway_side
from launcher.bench.side_run import Log, SideRun, Step, build_side_run
from runtime import bootstrap

NAME = "trl"
REQUIREMENTS = Path(__file__).parent / "requirements"
_PROGRAM = Path(__file__).parent / "trl_program.py"
# What both sides' programs share: standard library only.
_SHARED = Path(slipway_side.__file__).parent / "programs"
# Of another environment, and of a hub that is not needed: the model is a folder.
_NOT_ITS_OWN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(
    task: dict[str, Any], python: Path, max_seconds: float, folder: Path, progress: Callable[[str], None]
) -> SideRun:
    """One run. Raises JobFailed."""
    task_file, log = folder / "task.json", folder / "side.jsonl"
    task_file.write_text(json.dumps(task), encoding="utf-8")
    lifetime = child.run(
        "TRL's side of the comparison",
        [str(python), str(_PROGRAM), str(task_file), str(log)],
        folder=folder,
        environ=environ(),
        max_seconds=max_seconds,
        progress=progress,
    )
    found = Log(log)
    began = found.one("training")["began"]
    steps = [
        Step(line["ended"] - began, line["reward"], line["rollout_seconds"], line["training_seconds"])
        for line in found.of("step")
    ]
    return build_side_run(NAME, task["seed"], lifetime, found, steps, folder)


def environ() -> dict[str, str]:
    """This process's environment without what would lead its Python elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN}
    return kept | _OFFLINE | {"PYTHONPATH": str(_SHARED)}


def python_of(home: Home, progress: Callable[[str], None]) -> Path:
    """Its Python, built first where it is missing (1.2 GB). Raises BootstrapError."""
    return bootstrap.ensure_environment(
        home.environments / "trl", "trl", progress=progress, requirements=REQUIREMENTS
    )
