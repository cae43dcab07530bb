"""What each committed step measured: `metrics.jsonl`, and Weights & Biases where asked for.

Neighbours: the recipe writes, the gateway and `launch pull` read the file. Knows nothing of what is measured.
A line is written after its step's commit. A resumed recipe first makes the file agree with the checkpoints:
lines past the last commit go, a line lost between commit and write comes back.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

_WANDB_SECONDS = 30.0
_log = logging.getLogger(__name__)


def line_of(manifest: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A committed step's line, out of its checkpoint. `settings` is what its update really used."""
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

    def resume(self, last: dict[str, Any] | None) -> bool:
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
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        return [value for line in lines if (value := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class WandbLog:
    """The same numbers in Weights & Biases; offline runs lie in `folder` until `wandb sync`.

    The run's id is ours, so a resumed run goes on in the same one. A service that cannot be reached at the
    start costs the live page, not the training: the run is then kept offline, and the log says so.
    """

    def __init__(self, mode: str, project: str, run_id: str, folder: Path, config: dict[str, Any]) -> None:
        self._run: Any = None
        if mode == "disabled":
            return
        import wandb

        def start(mode: Any) -> Any:
            return wandb.init(
                project=project,
                id=run_id,
                name=run_id,
                dir=folder,
                mode=mode,
                resume="allow",
                config=config,
                # The log is the supervisor's, and the folder is no checkout of the user's work.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, init_timeout=_WANDB_SECONDS
                ),
            )

        try:
            self._run = start(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            _log.warning("Weights & Biases refused (%s); the run is kept offline in %s", error, folder)
            self._run = start("offline")

    def append(self, line: dict[str, Any]) -> None:
        """Log one step's numbers."""
        if self._run is not None:
            numbers = {f"train/{name}": value for name, value in line["metrics"].items()}
            counts = {f"counts/{name}": value for name, value in line["counts"].items() if name != "dropped"}
            self._run.log(numbers | counts | {"policy_version": line["version"]}, step=line["step"])

    def close(self) -> None:
        """Flush and end."""
        if self._run is not None:
            self._run.finish()
