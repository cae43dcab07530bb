"""Adapters and checkpoints of known content, and what transformers + peft make of them.

Used by the serving tests as the trainer's side: shares no code with runtime/trainer/policy.py.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from runtime.shared.checkpoint import Checkpoint, CheckpointStore

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, model: Path, *, seed: int, size: float = 0.3, rank: int = 16, alpha: int = 16
) -> Path:
    """A random all-linear LoRA in PEFT form, fp32. `size` is the spread of B; 0 makes it the base."""
    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, (rows, columns) in _shapes(config).items():
            block = "self_attn" if projection[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{projection}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model),
                "r": rank,
                "lora_alpha": alpha,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": list(PROJECTIONS),
                "inference_mode": True,
            }
        )
    )
    return folder


def change(folder: Path, into: Path, edit: Any) -> Path:
    """A copy of the adapter with `edit(tensors, config)` applied."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    edit(tensors, config)
    into.mkdir(parents=True, exist_ok=True)
    save_file(tensors, into / "adapter_model.safetensors")
    (into / "adapter_config.json").write_text(json.dumps(config))
    return into


def logprobs(model: Path, adapter: Path | None, sequence: list[int], temperature: float = 1.0) -> np.ndarray:
    """log p of each token but the first [T - 1], by transformers and peft in fp32, whole vocabulary."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        network = PeftModel.from_pretrained(network, str(adapter)).eval()
    ids = torch.tensor([sequence])
    with torch.no_grad():
        scores = (network(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None]).squeeze(1).numpy()


@functools.cache
def _of_base(model: Path, sequence: tuple[int, ...]) -> np.ndarray:
    return logprobs(model, None, list(sequence))


def commit(
    root: Path,
    model: Path,
    adapter: Path,
    *,
    version: int,
    sequence: list[int],
    prompt: int,
    step: int | None = None,
    state: dict[str, Any] | None = None,
    policy_adapter: Path | None = None,
    offset: float = 0.0,
) -> Checkpoint:
    """A whole checkpoint with the adapter and its probe: one `sequence` with `prompt` tokens of prompt.

    `step`: another than the version. `policy_adapter`, `offset`: make the trainer's word differ from the
    adapter.
    """
    policy = logprobs(model, policy_adapter or adapter, sequence) + offset
    base = _of_base(model, tuple(sequence))
    sampled = np.array([index >= prompt for index in range(len(sequence))], dtype=np.uint8)

    def write(partial: Path) -> None:
        change(adapter, partial / "adapter", lambda tensors, config: None)
        save_arrays(
            {
                "tokens": np.array(sequence, dtype=np.int64),
                "offsets": np.array([0, len(sequence)], dtype=np.int64),
                "sampled": sampled,
                "logprobs_policy": np.concatenate([[0.0], policy]).astype(np.float32),
                "logprobs_base": np.concatenate([[0.0], base]).astype(np.float32),
            },
            partial / "probe.safetensors",
        )

    return CheckpointStore(root).commit(version if step is None else step, version, state or {}, write)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
