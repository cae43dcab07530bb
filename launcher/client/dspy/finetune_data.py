"""The examples of an imitation in progress, kept in the run's folder for a program that is started again.

DSPy makes them by running the program, and half-way through a job the policy's answers differ: a restarted
job goes on with the very examples that it began with.
Neighbours: `training_job.py` alone. Knows nothing of steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.client.dspy.training_place import Place
from launcher.client.request_bodies import SupervisedExample


def load_or_save(
    folder: Path | None, place: Place, examples: Sequence[SupervisedExample]
) -> Sequence[SupervisedExample]:
    """The examples that the job at this place began with; `examples` if it begins now or none are found."""
    if folder is None or not folder.is_dir():
        return examples
    path = folder / f"finetune-{place.id}.jsonl"
    if place.step and path.is_file():
        return [SupervisedExample.model_validate_json(line) for line in path.read_text().splitlines()]
    if not place.superseded:
        fresh = path.with_name(f".{path.name}")
        fresh.write_text("".join(f"{it.model_dump_json(exclude_none=True)}\n" for it in examples))
        os.replace(fresh, path)
    return examples
