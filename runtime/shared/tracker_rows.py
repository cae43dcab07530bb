"""The rows that a tracker gets of a run, W&B or Trackio: one for each committed step and each validation.

    train/reward  train/reward/PREDICTOR  train/loss  train/lag2/clip_fraction  …   counts/trained  …
    val/score     val/reward  val/score/PREDICTOR  val/standard_error  …

A figure that the field knows under another name has both. Neighbours: `wandb_log.py` and the launcher's
`results/trackio_log.py` log the rows; `metrics.py` and `validations.py` have the lines that they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# TRL's names of what our metrics measure too. Reward, loss, entropy, grad_norm, learning_rate are alike.
_TRL_NAMES = {"kl_reference": "kl", "clip_fraction": "clip_ratio/region_mean"}
_VALIDATION_FIGURES = ("standard_error", "parse_rate", "cut_off_rate", "examples")


def step_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a line of `metrics.jsonl`."""
    metrics, counts = line["metrics"], line["counts"]
    row = {f"train/{name}": value for name, value in metrics.items()}
    row |= {f"train/{name}": metrics[own] for own, name in _TRL_NAMES.items() if own in metrics}
    if not line.get("settings", {}).get("kl_beta"):
        row.pop("train/kl", None)  # not measured
    if counts.get("groups"):
        row["train/frac_reward_zero_std"] = counts.get("groups_without_variance", 0) / counts["groups"]
    row |= {f"counts/{name}": value for name, value in counts.items() if name != "dropped"}
    return {**row, "train/step": line["step"], "policy_version": line["version"]}


def validation_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a line of `validations.jsonl`. Its step is the version that was scored."""
    name = f"val/{line['name']}"
    row = {name: line["score"], "val/step": line.get("version") or 0}
    row |= {f"{name}/{predictor}": value for predictor, value in (line.get("predictors") or {}).items()}
    if line["name"] == "score":
        row["val/reward"] = line["score"]
        row |= {f"val/{it}": line[it] for it in _VALIDATION_FIGURES if line.get(it) is not None}
    return row
