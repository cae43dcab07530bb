"""The command line that starts the trainer: every key of its recipe, from the run's configuration.

A key under `train.` has the same name in the recipe (`lora.rank` is `lora_rank` there): they are written
once, in train_config.py. Knows nothing of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from runtime.shared import parity_check
from runtime.shared.peft_format import portable_name
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.start_adapter_layout import START
from runtime.shared.train_config import TrainConfig

# `tune run` makes a module of the path (it drops the suffix, dots or not), found on PYTHONPATH.
_RECIPE = "runtime/recipes/grpo_lora.py"
RECIPES = Path(__file__).resolve().parent


def trainer_command(config: RuntimeConfig, *, follow: bool = True) -> list[str]:
    """`tune run` of the GRPO recipe for this run; `follow=False` ends after the last recorded batch.

    By way of `recipes/tune.py`, which skips those of torchtune's imports that no recipe here uses.
    """
    state = Path(config.state_dir)
    # The given settings, unresolved: a step with another loss must not take this loss's own values for the
    # run's settings.
    train = config.train
    keys = {
        "model_path": config.model_path,
        "base_model_name": config.model_name or portable_name(config.model_path),
        "init_adapter": start if (start := state / START).is_dir() else None,
        "steps_dir": state / "steps",
        "checkpoints_dir": state / "checkpoints",
        "output_dir": state,
        "follow": follow,
        "admit": parity_check.fingerprint(config) if follow else None,
        "run_id": config.run_id,
        "wandb_completions": config.wandb_completions,
        "device": config.device,
        "dtype": config.dtype,
        **recipe_keys(train),
        # The adapter that sampled a stale answer must be there to be asked (C51).
        "keep_checkpoints": max(train.keep_checkpoints, config.max_staleness + 1),
        "wandb_mode": config.wandb_mode,
        "wandb_project": config.wandb_project,
        "wandb_name": config.wandb_name,
    }
    ranks = ["--nproc_per_node", str(config.train_processes)] if config.train_processes > 1 else []
    return [
        sys.executable, "-m", "runtime.recipes.tune", "run", *ranks, _RECIPE,
        "--config", str(RECIPES / "configs" / "grpo_lora.yaml"),
        *(f"{name}={_yaml_value(value)}" for name, value in keys.items()),
    ]  # fmt: skip


def recipe_keys(train: TrainConfig) -> dict[str, Any]:
    """The keys under which the recipe has these settings: those that `step_settings.run_settings` reads."""
    lora = {f"lora_{name}": value for name, value in train.lora}
    return lora | {name: value for name, value in train if name != "lora"}


def _yaml_value(value: object) -> str:
    """A value as YAML on torchtune's command line, which takes one `=` in a word: texts are in quotes.

    A folder's name may read as a number, or have a `=` in it.
    """
    if isinstance(value, tuple):
        return f"[{','.join(_yaml_value(part) for part in value)}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("=", r"\u003d")
    return "null" if value is None else str(value)
