"""The other side of a comparison: TRL's own trainer in an environment of its own, and what it left.

Neighbours: `trl_environment.py` has its Python, `child.py` runs it, `programs/trl_program.py` is what it
runs. Knows nothing of our side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.bench import child
from launcher.bench.side_run import Log, SideRun, Step, side_run

NAME = "trl"
_PROGRAM = Path(__file__).parent / "programs" / "trl_program.py"
# Of another environment, and of a hub that is not needed: the model is a folder.
_NOT_ITS_OWN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(
    task: dict[str, Any], python: Path, most_seconds: float, folder: Path, progress: Callable[[str], None]
) -> SideRun:
    """One run. Raises JobFailed."""
    task_file, log = folder / "task.json", folder / "side.jsonl"
    task_file.write_text(json.dumps(task), encoding="utf-8")
    lived = child.run(
        "TRL's side of the comparison",
        [str(python), str(_PROGRAM), str(task_file), str(log)],
        folder=folder,
        environ=environ(),
        most_seconds=most_seconds,
        progress=progress,
    )
    found = Log(log)
    began = found.one("training")["began"]
    steps = [
        Step(line["ended"] - began, line["reward"], line["rollout_seconds"], line["training_seconds"])
        for line in found.of("step")
    ]
    return side_run(NAME, task["seed"], lived, found, steps, folder)


def environ() -> dict[str, str]:
    """This process's environment without what would lead its Python elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_ITS_OWN} | _OFFLINE
