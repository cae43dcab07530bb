"""A tiny random model of each family that is trained here, made by transformers' own classes.

Neighbours: test_families.py holds our network to transformers on them, test_engine_families.py to an engine.
Each has what goes wrong silently in its family: grouped heads, heads as wide as the family lets them be, a
window shorter than a row, rotations of its own, factors that are not 1, biases and norms not at rest.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.runtime.conftest import TINY_MODEL

VOCABULARY = 97
EOS = 2
WINDOW = 24
# The least that an engine without a GPU has attention for.
HEAD = 32
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# Where a family has no width of heads of its own, they share the model's.
_NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}
_WIDE = {"head_dim": HEAD}
_ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """transformers' names of its classes, its shape, and what is said of it in tests.

    `tied`: as its best known models are. `windowed`: it has layers that do not see a whole row. `targets`:
    the layers with LoRA, where they are not the seven of most. `vision`: of a multimodal checkpoint, the
    shape of the encoder of images beside it.
    """

    prefix: str
    shape: dict[str, Any]
    tied: bool = False
    windowed: bool = False
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config: str = field(default="")
    vision: dict[str, Any] = field(default_factory=dict)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_WINDOW = {"sliding_window": WINDOW}


def _llama3() -> dict[str, Any]:
    stretched = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, **stretched}


def _longrope() -> dict[str, Any]:
    """As Phi-4-mini: three quarters of a head turn, and by longer factors past the original context."""
    half = HEAD * 3 // 4 // 2
    factors = {
        "short_factor": [1.0 + 0.1 * place for place in range(half)],
        "long_factor": [2.0 + 0.5 * place for place in range(half)],
    }
    return {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75, **factors}


def _yarn() -> dict[str, Any]:
    bounds = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128}
    return {"rope_type": "yarn", "rope_theta": 1500.0, "factor": 4.0, **bounds}


def _two_rotations() -> dict[str, Any]:
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    return {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


_GEMMA = {**_WIDE, **_WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 20}
_EXPERTS = {"num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2", _NARROW, tied=True),
    "qwen2-window": Family(
        "Qwen2", {**_NARROW, **_WINDOW, "use_sliding_window": True, "max_window_layers": 1}, windowed=True
    ),
    "qwen3": Family("Qwen3", _WIDE, tied=True),
    "llama": Family("Llama", {**_WIDE, "rope_parameters": _llama3()}, tied=True),
    "mistral": Family("Mistral", {**_WIDE, **_WINDOW}, windowed=True),
    "phi3": Family("Phi3", {**_NARROW, **_WINDOW}, windowed=True, targets=_FUSED),
    "phi4-mini": Family(
        "Phi3",
        {**_NARROW, "original_max_position_embeddings": 256, "rope_parameters": _longrope()},
        tied=True,
        targets=_FUSED,
    ),
    "gemma2": Family(
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        tied=True,
        windowed=True,
    ),
    "gemma3": Family(
        "Gemma3",
        {**_GEMMA, "rope_parameters": _two_rotations()},
        tied=True,
        windowed=True,
        config="Gemma3TextConfig",
    ),
    "olmo2": Family("Olmo2", _NARROW),
    "granite": Family(
        "Granite",
        {
            **_NARROW,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
        tied=True,
    ),
    "smollm3": Family("SmolLM3", {**_NARROW, "no_rope_layers": [1, 0]}, tied=True),
    "qwen3-moe": Family(
        "Qwen3Moe",
        {**_WIDE, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
        targets=_ATTENTION,
    ),
    "gpt-oss": Family(
        "GptOss",
        {
            **_WIDE,
            **_WINDOW,
            **_EXPERTS,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "rope_parameters": _yarn(),
        },
        windowed=True,
        targets=_ATTENTION,
    ),
}

_HYBRID: dict[str, Any] = {**_WIDE, "num_hidden_layers": 4}
_GATED = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
# Attention and layers that pass a state along: of these a row holds one sequence.
HYBRIDS: dict[str, Family] = {
    "qwen3-next": Family(
        "Qwen3Next",
        {
            **_HYBRID,
            **_GATED,
            **_EXPERTS,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        targets=_ATTENTION,
    ),
    "falcon-h1": Family("FalconH1", {**_WIDE, **_MAMBA, "mamba_d_ssm": 128}),
    "granite-hybrid": Family(
        "GraniteMoeHybrid",
        {
            **_NARROW,
            **_MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
        targets=_ATTENTION,
    ),
}
_SEES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
_SIGLIP = {**_SEES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_PIXTRAL = {**_SEES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {**_SEES, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
_QWEN3_5 = {**_HYBRID, **_GATED, "layer_types": ["linear_attention", "full_attention"] * 2}
# As published: an encoder of images stands beside the language model.
MULTIMODAL_FAMILIES: dict[str, Family] = {
    "gemma3-4b": replace(FAMILIES["gemma3"], config="", vision=_SIGLIP),
    "mistral3": Family("Mistral3", _WIDE, vision=_PIXTRAL),
    "qwen3.5": Family("Qwen3_5", _QWEN3_5, tied=True, vision=_QWEN_VISION),
    "qwen3.5-moe": Family(
        "Qwen3_5Moe",
        {
            **_QWEN3_5,
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        targets=_ATTENTION,
        vision=_QWEN_VISION,
    ),
}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="slipway-families-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def family_folder(name: str, *, tied: bool | None = None, **changes: Any) -> Path:
    """The folder of a family's model, fp32, over 97 tokens; removed when the process ends.

    `tied`: whether input and output embeddings are one; by default as the family's are. `changes`: of its
    config.json.
    """
    folder = _root() / "-".join([name, *map(str, (tied, *sorted(changes.items())))]).replace("/", "_")
    return made(name, folder, VOCABULARY, tied=tied, **changes)


def made(name: str, folder: Path, vocabulary: int, *, tied: bool | None = None, **changes: Any) -> Path:
    """Write a family's random model."""
    family = (FAMILIES | HYBRIDS | MULTIMODAL_FAMILIES)[name]
    tied = family.tied if tied is None else tied
    described = {**_SHAPE, "vocab_size": vocabulary, "tie_word_embeddings": tied} | family.shape | changes
    config: type[Any] = getattr(transformers, family.config or f"{family.prefix}Config")
    kind = "ForCausalLM"
    if family.vision:
        kind = "ForConditionalGeneration"
        described = {
            "text_config": described, "vision_config": family.vision, "tie_word_embeddings": tied
        }  # fmt: skip
    model: Callable[[Any], Any] = getattr(transformers, f"{family.prefix}{kind}")
    torch.manual_seed(0)
    random = model(config(**described))
    _unsettle(random)
    random.save_pretrained(folder)
    return folder


def served_folder(name: str, folder: Path, **changes: Any) -> Path:
    """A family's random model with the embedded model's tokenizer, for an engine.

    It has no chat template: parsers are chosen by it, and of a gpt-oss vLLM reads no other than its own.
    """
    tokens = transformers.AutoConfig.from_pretrained(TINY_MODEL).vocab_size
    made(name, folder, tokens, **changes)
    for file in _TOKENIZER:
        shutil.copy(TINY_MODEL / file, folder / file)
    return folder


@torch.no_grad()
def _unsettle(model: torch.nn.Module) -> None:
    """Move biases off 0 and norms off rest, where transformers starts them and mistakes do not show."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or name.endswith("bias"):
            weight.add_(torch.randn_like(weight) * 0.2)
