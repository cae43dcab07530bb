"""The trainer's recipe in the test's own process, over recorded batches, on a random model of two layers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from runtime.recipes.command import RECIPES, trainer_command
from runtime.recipes.grpo_lora import GRPOLoRARecipe
from runtime.shared.batch import Batch, step_folder, write_batch
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_config import LoraConfig, TrainConfig
from tests.runtime.trainer_fixtures import LORA, tiny_model


def configured(folder: Path, train: dict[str, Any] | None = None, **changes: Any) -> RuntimeConfig:
    """A run in this folder; `train`: keys of its training."""
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    keys = {"lora": LoraConfig(rank=LORA.rank, alpha=LORA.alpha), "pack_tokens": 128, **(train or {})}
    return RuntimeConfig(
        run_id="recipe-here",
        model_path=str(tiny_model()),
        state_dir=str(folder),
        socket_dir=str(folder),
        train=TrainConfig.model_validate(keys),
        **changes,
    )


def give(config: RuntimeConfig, *batches: Batch) -> None:
    """Record batches, each as that of its own step."""
    for batch in batches:
        write_batch(step_folder(Path(config.state_dir) / "steps", batch.step), batch)


@contextmanager
def set_up(config: RuntimeConfig) -> Iterator[GRPOLoRARecipe]:
    """A recipe that is ready to train; what it changed of this process is put back."""
    words = [word for word in trainer_command(config, follow=False) if "=" in word]
    merged = OmegaConf.merge(
        OmegaConf.load(RECIPES / "configs" / "grpo_lora.yaml"),
        OmegaConf.from_dotlist([*words, "threads=1"]),  # a pool of them would not survive a test's fork
    )
    assert isinstance(merged, DictConfig)
    before = signal.getsignal(signal.SIGTERM)
    try:
        recipe = GRPOLoRARecipe(merged)
        recipe.setup()
        yield recipe
    finally:
        signal.signal(signal.SIGTERM, before)
        torch.use_deterministic_algorithms(False)


def train(config: RuntimeConfig) -> GRPOLoRARecipe:
    """One life of the trainer over what is recorded."""
    with set_up(config) as recipe:
        recipe.train()
        recipe.cleanup()
    return recipe


def measured(folder: Path) -> dict[int, dict[str, float]]:
    """By step, what metrics.jsonl says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["metrics"] for line in map(json.loads, lines)}
