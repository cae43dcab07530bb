"""runtime/shared/memory/activations.py against what a forward pass of the real policy keeps, counted.

The formula was written from other shapes than these: of Qwen2, Qwen3, Llama, Mistral, Phi-3, Gemma 3, OLMo 2,
Granite and SmolLM3, four layers each; the gated delta rule's from other Qwen3.5s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.shared.memory.activations import ActivationModel
from runtime.shared.model_shape import shape
from runtime.shared.peft_format import Lora
from runtime.trainer.packing import Sequences, pack
from runtime.trainer.policy import DTYPES, Policy, build

RANK = 4
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 160, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 24,
              "intermediate_size": 272, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "seed_oss": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
                 "intermediate_size": 520, "num_hidden_layers": 5},
    "ministral": {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 16,
                  "intermediate_size": 300, "num_hidden_layers": 2, "sliding_window": 48},
    "exaone4": {"hidden_size": 144, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 40,
                "intermediate_size": 432, "num_hidden_layers": 3},
    "phi3": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 344,
             "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3_moe": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48,
                  "intermediate_size": 256, "moe_intermediate_size": 80, "num_experts": 6,
                  "num_experts_per_tok": 3, "num_hidden_layers": 3},
    "qwen3_5_text": {"hidden_size": 112, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
                     "intermediate_size": 264, "num_hidden_layers": 4, "linear_key_head_dim": 24,
                     "linear_value_head_dim": 40, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
    "qwen3_next": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                   "intermediate_size": 200, "moe_intermediate_size": 56, "num_experts": 4,
                   "num_experts_per_tok": 2, "shared_expert_intermediate_size": 72, "num_hidden_layers": 4,
                   "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 2},
}  # fmt: skip


def made(folder: Path, model_type: str) -> dict[str, Any]:
    """A random model of this shape, and its config.json."""
    torch.manual_seed(0)
    said = {"vocab_size": 320, "max_position_embeddings": 1024} | SHAPES[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **said))
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def kept_bytes(policy: Policy) -> tuple[int, int]:
    """Bytes of all storages that a forward pass over one pack keeps, weights aside, and the row's places."""
    generator = torch.Generator().manual_seed(1)
    prompt, *answers = (torch.randint(3, 300, (size,), generator=generator) for size in (40, 150, 150, 150))
    tokens = [torch.cat([prompt, answer]) for answer in answers]
    sampled = [torch.arange(190) >= 40 for _ in tokens]
    (one,) = pack(Sequences(tokens, sampled, [0, 190, 380]), [0, 1, 2], 1024)
    weights = [*policy.model.parameters(), *policy.model.buffers()]
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or its address would be given to another one
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
    assert one.tokens_BL.shape[0] == 1
    return sum(sizes.values()), one.tokens_BL.shape[1]


@pytest.mark.parametrize("recompute", [False, True], ids=["whole", "checkpointing"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", SHAPES)
def test_what_is_kept_is_what_was_predicted(
    tmp_path: Path, model_type: str, dtype: str, recompute: bool
) -> None:
    config = made(tmp_path, model_type)
    policy = build(tmp_path, Lora(RANK, RANK), dtype=dtype, device="cpu", seed=0, recompute=recompute)
    measured, places = kept_bytes(policy)
    of = shape(config)
    assert of is not None
    kept = ActivationModel(of, RANK, policy.lora.target_modules, DTYPES[dtype].itemsize, masked=True)
    predicted = kept.row(places, checkpointing=recompute)
    assert predicted == pytest.approx(measured, rel=0.10)


def test_what_is_kept_with_lora_on_some_layers_is_what_was_predicted(tmp_path: Path) -> None:
    config = made(tmp_path, "seed_oss")
    lora = Lora(RANK, RANK, target_modules=("q_proj", "v_proj"))
    policy = build(tmp_path, lora, dtype="bfloat16", device="cpu", seed=0)
    measured, places = kept_bytes(policy)
    of = shape(config)
    assert of is not None
    predicted = ActivationModel(of, RANK, lora.target_modules, masked=True).row(places, checkpointing=False)
    assert predicted == pytest.approx(measured, rel=0.10)
