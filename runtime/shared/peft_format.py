"""An adapter's format on disk, PEFT's: the adapters that can be trained and served here, and their base's
name.

Neighbours: `policy.py` reads and writes the tensors, `launcher/models/adapter_folder.py` refuses the same
adapters before a run. Pure: knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.shared.architectures import PolicyError
from runtime.shared.language_model import published_module
from runtime.shared.model_shape import ModelShape
from runtime.shared.start_adapter_layout import FILES

CONFIG, WEIGHTS = FILES
PREFIX = "base_model.model."
# The ranks that vLLM has kernels for (vllm.config.lora.MaxLoRARanks).
_ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The path where the hub's own library keeps a download: the name is in it.
_DOWNLOADED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+/?$")


@dataclass(frozen=True)
class Lora:
    """An adapter's shape. `target_modules` empty: all of the model's linear layers."""

    rank: int
    alpha: float
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The update is this times B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def with_target_modules(self, target_modules: Sequence[str]) -> Lora:
        """The same on these layers."""
        return replace(self, target_modules=tuple(target_modules))


def engine_rank(rank: int) -> int:
    """vLLM's rank setting for adapters of this rank."""
    return next(size for size in _ENGINE_RANKS if size >= rank)


def portable_name(model: str) -> str:
    """A model's name that means the same on another machine: its hub name, else its folder's own.

    A text that is no folder's path is a name already.
    """
    downloaded = _DOWNLOADED.search(model)
    if downloaded is not None:
        return f"{downloaded[1]}/{downloaded[2]}"
    is_path = model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()
    return Path(model).expanduser().absolute().name if is_path else model


def tensor_shapes(shape: ModelShape, rank: int, targets: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Every tensor of an adapter on a model of this shape, by name: A is [rank, in], B is [out, rank].

    `targets`: the names of the layers that have it; None: those it is on by default.
    """
    found: dict[str, list[int]] = {}
    for layer, linear in shape.with_lora(targets):
        module = f"model.layers.{layer}.{linear.place}"
        name = PREFIX + published_module(module, multimodal=shape.multimodal)
        found |= {f"{name}.lora_A.weight": [rank, linear.into], f"{name}.lora_B.weight": [linear.out, rank]}
    return found


def check_adapter_config(config: dict[str, Any], lora: Lora) -> None:
    """Refuse an adapter that would be trained or served as something else (C14, C27)."""
    refused = {
        "use_dora": "DoRA",
        "use_qalora": "quantised LoRA",
        "modules_to_save": "whole modules beside the adapter",
        "trainable_token_indices": "rows of the embeddings",
        "target_parameters": "parameters that are no linear layer",
        "layers_to_transform": "some of the layers only",
        "layer_replication": "repeated layers",
        "alora_invocation_tokens": "an adapter that begins at a token",
        "lora_bias": "a bias beside B",
        "rank_pattern": "a rank per layer",
        "alpha_pattern": "an alpha per layer",
        "fan_in_fan_out": "transposed layers",
    }
    if config.get("peft_type", "LORA") != "LORA":
        raise PolicyError(f"the adapter is of the kind {config['peft_type']}, only LORA is supported")
    for key, what in refused.items():
        if config.get(key):
            raise PolicyError(f"the adapter uses {what} ({key}), which is not supported")
    if config.get("bias", "none") != "none":
        raise PolicyError(f"the adapter trains biases (bias={config['bias']!r}), which is not supported")
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, "gaussian"):  # the others move a part of the base into the adapter
        raise PolicyError(f"the adapter was started by {start} (init_lora_weights), which changes the base")
    if sorted(config["target_modules"]) != sorted(lora.target_modules):
        raise PolicyError(
            f"the adapter targets {sorted(config['target_modules'])}, the run {sorted(lora.target_modules)}"
        )
    if (config["r"], float(config["lora_alpha"])) != (lora.rank, float(lora.alpha)):
        found = f"rank {config['r']}, alpha {config['lora_alpha']}"
        raise PolicyError(f"the adapter has {found}, the run rank {lora.rank}, alpha {lora.alpha:g}")
    if bool(config.get("use_rslora")) != lora.use_rslora:
        raise PolicyError(
            f"the adapter is scaled with use_rslora={bool(config.get('use_rslora'))}, "
            f"the run with {lora.use_rslora}"
        )
