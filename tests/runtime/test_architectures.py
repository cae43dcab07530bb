"""What is refused by its config.json alone, and what is tried: with transformers' own configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from runtime.shared.architectures import PolicyError, check_trainable, positions, rotation, state_of
from runtime.shared.model_shape import shape
from runtime.shared.projections import ATTENTION, PROJECTIONS, lora_targets
from tests.runtime.families import FAMILIES, HYBRIDS, family_folder

STATE = "passes a state along its tokens"
# By transformers' model_type: its class, and what is said of it.
REFUSED = {
    "jamba": ("JambaForCausalLM", STATE),
    "bamba": ("BambaForCausalLM", STATE),
    "zamba2": ("Zamba2ForCausalLM", STATE),
    "nemotron_h": ("NemotronHForCausalLM", STATE),
    "olmo_hybrid": ("OlmoHybridForCausalLM", STATE),
    "kimi_linear": ("KimiLinearForCausalLM", STATE),
    "minimax": ("MiniMaxForCausalLM", STATE),
    "lfm2": ("Lfm2ForCausalLM", STATE),
    "lfm2_moe": ("Lfm2MoeForCausalLM", STATE),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", STATE),
    "mamba2": ("Mamba2ForCausalLM", STATE),
    "rwkv": ("RwkvForCausalLM", STATE),
    "xlstm": ("xLSTMForCausalLM", STATE),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "kv_lora_rank"),
    "llava": ("LlavaForConditionalGeneration", "text_config"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "text_config"),
    "t5": ("T5ForConditionalGeneration", "not a causal language model"),
}
# As the hub has them, in the words of their own time.
WRITTEN = {
    "LFM2": ({"architectures": ["Lfm2ForCausalLM"], "conv_L_cache": 3, "full_attn_idxs": [2, 5]}, STATE),
    "its own code": (
        {
            "architectures": ["MyForCausalLM"],
            "model_type": "my",
            "auto_map": {"AutoModelForCausalLM": "m.My"},
        },
        "auto_map",
    ),
    "quantized": (
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}},
        "quantized \\(awq\\)",
    ),
    "two architectures": (
        {"architectures": ["LlamaForCausalLM", "MyForCausalLM"]},
        "exactly one architecture",
    ),
    "none": ({"model_type": "llama"}, "exactly one architecture"),
    "rotations by the context": (
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "dynamic",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_trained_here_is_refused_by_its_name_and_with_the_reason(kind: str) -> None:
    architecture, why = REFUSED[kind]
    config = CONFIG_MAPPING[kind]()
    described = json.loads(config.to_json_string()) | {"architectures": [architecture]}
    with pytest.raises(PolicyError, match=f"^cannot train {architecture}: .*{why}"):
        check_trainable(described)


@pytest.mark.parametrize(("config", "why"), WRITTEN.values(), ids=WRITTEN)
def test_a_config_in_the_words_of_its_time_is_refused_as_well(config: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        check_trainable(config)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_whose_adapters_are_served_is_tried_and_known_to_pass_a_state(name: str) -> None:
    check_trainable(described(name))
    assert state_of(described(name))
    assert (shape(described(name)) is None) == (name != "qwen3-next")
    assert lora_targets(described(name)) == HYBRIDS[name].targets
    assert state_of(described("gpt-oss")) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_tried_and_its_linear_layers_are_known_by_its_config(name: str) -> None:
    config = described(name)
    check_trainable(config)
    assert lora_targets(config) == FAMILIES[name].targets
    assert lora_targets(config, ("v_proj",)) == ("v_proj",)


def test_of_experts_it_is_attention_that_is_trained() -> None:
    assert lora_targets(described("qwen3-moe")) == lora_targets(described("gpt-oss")) == ATTENTION
    assert lora_targets(described("qwen3")) == PROJECTIONS


def test_a_context_ends_where_the_engine_and_transformers_would_rotate_otherwise() -> None:
    assert positions(described("qwen3")) == 512
    assert positions(described("phi4-mini")) == 256
    hub = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    hub |= {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "long_factor": [], "short_factor": []},
    }
    assert positions(hub) == 4096
    assert rotation(hub)["rope_type"] == "longrope"


def described(name: str) -> dict[str, Any]:
    return json.loads((family_folder(name) / "config.json").read_text())
