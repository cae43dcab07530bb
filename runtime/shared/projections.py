"""The linear layers of a block that an adapter has, by the names Hugging Face's files, PEFT and vLLM share.

Neighbours: the trainer puts LoRA on them, engine/ puts LoRA on the same ones and compares its tensors,
peft_format.py refuses an adapter that has others. Pure names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Fused by engines into one product each, in this order.
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
ATTENTION = (*QKV, "o_proj")
FEED_FORWARD = (*GATE_UP, "down_proj")
PROJECTIONS = (*ATTENTION, *FEED_FORWARD)
# Inside a layer: `self_attn.q_proj`, ….
PLACES = (*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in FEED_FORWARD))
# Stored fused already, by families whose files have them so.
_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_FUSED_TYPES = {"phi3"}
# Families whose blocks have only some of the seven, or others beside them.
_OWN = {
    "apertus": (*ATTENTION, "up_proj", "down_proj"),
    "arcee": (*ATTENTION, "up_proj", "down_proj"),
    "glm": (*ATTENTION, "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "granitemoehybrid": ATTENTION,
    "phi": (*QKV, "dense", "fc1", "fc2"),
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
}
# Families whose blocks have the layers that `lora_targets` lists and no other; of others it is not known.
LISTED = {
    "cohere", "cohere2", "cwm", "diffllama", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "gpt_oss", "granite", "granitemoe", "helium", "hyperclovax", "llama", "minimax_m2", "ministral3",
    "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "stablelm", "vaultgemma",
}  # fmt: skip
# The keys of a config.json for a block with experts; LoRA is on attention then.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether some of the model's blocks are mixtures of experts."""
    return any(config.get(key) for key in _EXPERTS)


def lora_targets(config: Mapping[str, Any], chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names of the layers with LoRA in a model of this config.json: those chosen, else all linear ones.

    Of a mixture of experts all of attention.
    """
    if chosen:
        return tuple(chosen)
    kind = str(config.get("model_type"))
    own = _FUSED if kind in _FUSED_TYPES else _OWN.get(kind, PROJECTIONS)
    return tuple(name for name in own if name in ATTENTION) if has_experts(config) else own
