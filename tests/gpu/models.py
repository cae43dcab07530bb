"""Models of the widths that people train, with random weights, made on the spot: nothing is downloaded.

Their logprobs mean nothing; what they cost is what a trained model of the shape costs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.support.environment import REPOSITORY

TINY = REPOSITORY / "runtime" / "tiny" / "model"
# Of the embedded model's folder: what is its own.
_OF_TINY = ("config.json", "model.safetensors", "FIGURES.json")


def qwen3(folder: Path, **changes: Any) -> Path:
    """Qwen3-0.6B: q/k norms, heads wider than the model divided by them, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    return _saved(Qwen3ForCausalLM, Qwen3Config(**shape | changes), folder)


def qwen2(folder: Path) -> Path:
    """Qwen2.5-1.5B, but for its vocabulary: the embedded model's, whose tokenizer lies beside it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(*_OF_TINY), dirs_exist_ok=True)
    tiny = json.loads((TINY / "config.json").read_text())
    config = Qwen2Config(
        vocab_size=tiny["vocab_size"],
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tiny["eos_token_id"],
        pad_token_id=tiny["pad_token_id"],
    )
    return _saved(Qwen2ForCausalLM, config, folder)


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
