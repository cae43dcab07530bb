"""A training's validations as Arbor's users read them: by its count of steps, in percent, with its names.

Neighbours: `optimizer.py` shows them; the history is that of `client/dspy/training.py`.
Knows nothing of programs or of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ArborValidations:
    """`history`: the loop's records, in order. `run_dir`: the folder where checkpoints come home."""

    history: Sequence[dict[str, Any]]
    run_dir: Path | None = None

    @property
    def scores(self) -> dict[int, float]:
        """The scores by step: -1 is before training, 0 after the first step."""
        return {it["step"] - 1: _percent(it["score"]) for it in self._all()}

    @property
    def best_step(self) -> int | None:
        """The step of the validation that was found best, by the examples that it and the others scored."""
        best = self._best()
        return best["step"] - 1 if best is not None else None

    @property
    def best_score(self) -> float | None:
        """Its score."""
        best = self._best()
        return _percent(best["score"]) if best is not None else None

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint of the best; None if that is the model before this training."""
        best = self._best()
        return best["checkpoint"] if best is not None else None

    def checkpoints(self, keep: str) -> dict[str, dict[str, Any]]:
        """The checkpoints that were kept, by Arbor's names, the newest last."""
        kept = [it for it in self._all() if it["best"] and it["checkpoint"] and it["step"]]
        if keep == "none":
            return {}
        if keep == "single-best":
            names, kept = ["model_checkpoint_best"] * len(kept[-1:]), kept[-1:]
        else:
            names = [f"model_checkpoint_step_{it['step']}" for it in kept]
        return {name: self._checkpoint_info(name, it) for name, it in zip(names, kept, strict=True)}

    def _checkpoint_info(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        score = _percent(entry["score"])
        folder = str(self.run_dir / "durable" / entry["checkpoint"]) if self.run_dir else entry["checkpoint"]
        return {
            "checkpoint_name": name,
            "checkpoint_dir": folder,
            "global_step": entry["step"],
            "score": score,
            "metadata": {"score": score, "step_index": entry["step"] - 1},
        }

    def _all(self) -> list[dict[str, Any]]:
        return [it for it in list(self.history) if it["kind"] == "validation"]

    def _best(self) -> dict[str, Any] | None:
        return next((it for it in reversed(self._all()) if it["best"]), None)


def _percent(score: float) -> float:
    return round(100 * score, 2)
