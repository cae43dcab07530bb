"""Refuses models that cannot be trained here, by their config.json alone, with the reason.

Neighbours: `launcher/models/model_folder.py` asks before a run, the trainer when it builds the policy. Any
other causal language model is tried: it is admitted when engine and trainer agree on it (C58). Pure: knows
nothing of torch or weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.shared.language_model import MULTIMODAL, is_multimodal, language_model

# How wide a head may be for vLLM 0.32's attention on a CPU (CPUAttentionBackend.get_supported_head_sizes).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# Layers of attention; any other kind passes a state from token to token.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_STATE_KEYS = (
    "mamba_d_state",
    "mamba_n_heads",
    "ssm_cfg",
    "state_size",
    "linear_num_key_heads",
    "attn_layer_period",
    "ssm_state_size",
    "conv_L_cache",
    "lru_width",
    "rescale_every",
    "sequence_kernel",
)
# Hybrids of both whose adapters an engine was seen to serve as they were trained; others are refused by name.
# `GATED_DELTA`: of them those with the gated delta rule, and attention with a gate.
GATED_DELTA = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_SERVED_HYBRIDS = {"falcon_h1", "granitemoehybrid", *GATED_DELTA}
# Quantized formats that the trainer reads as the plain weights they stand for.
_READABLE_QUANTIZATIONS = {"mxfp4"}


# Of the families whose files bring code of their own: those that transformers and vLLM have without it.
_NATIVE = {
    "exaone4",
    "falcon_h1",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
}


class PolicyError(Exception):
    """The model or the adapter cannot be trained here; the text names those that can."""


def check_trainable(config: Mapping[str, Any]) -> None:
    """Raise PolicyError, with the reason, for the config.json of a model that is not trained here."""
    config = language_model(config)
    kinds = config.get("architectures") or []
    name = kinds[0] if len(kinds) == 1 else f"{config.get('model_type') or 'model without a type'}"
    for why in _reasons(config, kinds):
        raise PolicyError(f"cannot train {name}: {why}")


def _reasons(config: Mapping[str, Any], kinds: list[str]) -> Iterator[str]:
    if not isinstance(kinds, list) or len(kinds) != 1:
        yield "its config.json does not name exactly one architecture"
    elif is_multimodal(config) and "text_config" in config:
        yield "its text_config is no object"
    elif "text_config" in config:
        trained = ", ".join(sorted(MULTIMODAL))
        yield f"it holds other parts beside the language model (text_config); of such models {trained} can be"
    elif is_multimodal(config) and config.get("model_type") != MULTIMODAL[kinds[0]]:
        yield f"its language model is a {config.get('model_type')}, not a {MULTIMODAL[kinds[0]]}"
    elif not is_multimodal(config) and not str(kinds[0]).endswith(("ForCausalLM", "LMHeadModel")):
        yield f"{kinds[0]} is not a causal language model"
    if config.get("auto_map") and config.get("model_type") not in _NATIVE:
        yield "it needs its own code (auto_map), which is never run"
    method = (config.get("quantization_config") or {}).get("quant_method")
    if config.get("quantization_config") and method not in _READABLE_QUANTIZATIONS:
        yield f"its weights are quantized ({method}); use the unquantized model"
    if (state := state_of(config)) and config.get("model_type") not in _SERVED_HYBRIDS:
        served = ", ".join(sorted(_SERVED_HYBRIDS))
        yield f"it passes a state along its tokens ({state}); of such models {served} can be"
    if config.get("kv_lora_rank"):
        yield "its attention works on compressed keys (kv_lora_rank), which adapters are not served for"
    if (kind := rotation(config).get("rope_type")) == "dynamic":
        yield f"its rotations depend on how long the context is ({kind})"


def check_on_cpu(config: Mapping[str, Any]) -> None:
    """Raise PolicyError, with the reason, for the config.json of a model that vLLM's CPU build cannot
    compute."""
    size = head_size(config)
    if size is not None and size not in CPU_HEAD_SIZES:
        served = ", ".join(map(str, CPU_HEAD_SIZES))
        raise PolicyError(f"its heads are {size} wide, and attention on a CPU is computed for {served}")


def check_dtype_on_cpu(config: Mapping[str, Any], dtype: str) -> None:
    """Raise PolicyError for a model that vLLM's CPU build computes in bfloat16 alone, in another dtype."""
    if config.get("model_type") in GATED_DELTA and dtype != "bfloat16":
        raise PolicyError(
            f"its layers with a gated delta rule are computed in bfloat16 on a CPU, not in {dtype}"
        )


def head_size(config: Mapping[str, Any]) -> int | None:
    """The width of an attention head; None if the config does not tell."""
    hidden, heads, head_dim = (config.get(it) for it in ("hidden_size", "num_attention_heads", "head_dim"))
    if isinstance(head_dim, int) and head_dim:
        return head_dim
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def state_of(config: Mapping[str, Any]) -> str | None:
    """The config key by which a model passes a state along its tokens, which packed samples would share."""
    odd = sorted(set(config.get("layer_types") or ()) - _ATTENTION_LAYERS)
    return next(iter(odd + [key for key in _STATE_KEYS if config.get(key)]), None)


def rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's settings. transformers 5 has all in `rope_parameters`, 4 in two keys."""
    settings: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    settings |= config.get("rope_scaling") or {}
    settings |= config.get("rope_parameters") or {}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    return settings


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens with one and the same computation; None if there is no such bound.

    A model with `longrope` rotates differently once a context is longer than the original one: an engine
    decides by its longest possible context, transformers by the given one. Up to the original length both do
    the same.
    """
    longest = config.get("max_position_embeddings")
    rope = rotation(config)
    if rope["rope_type"] != "longrope":
        return longest
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return min(int(found) for found in (longest, original) if found) if (longest or original) else None


def checked_context(config: Mapping[str, Any], max_model_len: int | None) -> int | None:
    """The model's own context in tokens. Raises PolicyError if a longer one is asked for."""
    longest = positions(config)
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise PolicyError(
            f"engine.max_model_len is {max_model_len}, and by its config.json this model has {longest} tokens"
        )
    return longest
