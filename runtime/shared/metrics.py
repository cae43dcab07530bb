"""The measurements of each committed step: `metrics.jsonl`.

Neighbours: the recipe writes, the gateway and `launch pull` read the file; `wandb_log.py` has the same for
Weights & Biases. Knows nothing of the measurements.
A line is written after its step's commit. A resumed recipe first makes the file agree with the checkpoints:
lines past the last commit go, a line lost between commit and write comes back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def line_of(manifest: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A committed step's line, from its checkpoint. `settings` are those that its update really used."""
    return {
        "schema": 1,
        "step": manifest["step"],
        "version": manifest["version"],
        "time": manifest["created"],
        "kind": state.get("kind", "train"),
        "settings": state.get("settings", {}),
        "metrics": state.get("metrics", {}),
        "counts": state.get("counts", {}),
    }


class MetricsLog:
    """`metrics.jsonl` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reconcile(self, last: dict[str, Any] | None) -> bool:
        """Agree with the newest checkpoint, whose own line is `last` (None: nothing is committed).

        Returns whether that line had been lost: the end came between its commit and its logging.
        """
        step = 0 if last is None else last["step"]
        found = self.read()
        kept = [line for line in found if line["step"] < step]
        if last is not None:
            kept.append(last)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self.path)
        return last is not None and all(line["step"] != step for line in found)

    def append(self, line: dict[str, Any]) -> None:
        """Add one step's line."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; a torn last one is left out."""
        return read_lines(self.path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole object of a file of lines; empty if there is no file."""
    if not path.exists():
        return []
    return [value for line in path.read_text().splitlines() if (value := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
