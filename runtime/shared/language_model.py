"""The language model inside a multimodal checkpoint: its own config.json, and its tensors' names.

A checkpoint such as Gemma 3 (from 4B) or Qwen3.5 holds an encoder of images beside its language model, which
is described by `text_config`. Training and serving take the language model alone. Neighbours: whoever reads a
config.json takes `language_model` of it first; the trainer and `merging.py` map names by this file. Pure:
knows nothing of files, torch or weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# By published architecture, the type of its text_config: those whose adapters an engine was seen to serve as
# they were trained (tests/runtime/test_engine_families.py). Others are refused by name.
MULTIMODAL = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
# Where the language model's modules stand in the published model, and in the language model alone. The hub's
# files have several spellings of the first.
_INSIDE, _ALONE = "model.language_model.", "model."
_FILES_INSIDE = r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)"
_FILES_HEAD = r"^(?:model\.)?language_model\.lm_head"
# The modules of a published model that are not the language model's, as PEFT's `exclude_modules`.
OTHER_MODULES = r"(?!.*\blanguage_model\.).*"
# Decay rates of the gated delta rule: published in fp32, and computed with so by vLLM, whatever the rest is.
KEPT_IN_FP32 = "linear_attn.A_log"
_TENSORS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_BESIDE = ("tie_word_embeddings", "quantization_config", "auto_map")
# transformers' defaults (5.19) of what published files leave out, such as google/gemma-3-4b-it's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
}


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or the language model's part of it, is of a multimodal checkpoint."""
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]) in MULTIMODAL


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model alone; of a text-only model the same. Its architecture stays the
    published one."""
    inner = config.get("text_config")
    if not is_multimodal(config) or not isinstance(inner, Mapping):
        return dict(config)
    kind = MULTIMODAL[config["architectures"][0]]
    # Of these the published value counts, as transformers and vLLM have it.
    beside = {key: config[key] for key in _BESIDE if key in config}
    found = {"model_type": kind, **_DEFAULTS.get(kind, {}), **inner, **beside}
    return found | {"architectures": list(config["architectures"])}


def published_module(module: str, *, multimodal: bool) -> str:
    """The published model's name of a module, which an adapter has: "model.layers.0.mlp.up_proj" of the
    language model is "model.language_model.layers.0.mlp.up_proj" in a multimodal one."""
    return _INSIDE + module.removeprefix(_ALONE) if multimodal else module


def file_name_mapping() -> dict[str, str]:
    """Patterns of tensors' names in a multimodal checkpoint's files, and the language model's own names."""
    return {_FILES_INSIDE: _ALONE, _FILES_HEAD: "lm_head"}


def name_in_language_model(name: str) -> str:
    """The language model's own name of a tensor that a checkpoint's files, or an adapter, call so."""
    for pattern, own in file_name_mapping().items():
        name = re.sub(pattern, own, name)
    return name


def is_of_language_model(name: str) -> bool:
    """Whether a tensor in a checkpoint's files is the language model's."""
    return name_in_language_model(name).startswith(_TENSORS)
