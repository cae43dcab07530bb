"""Model folders as the hub has them: configurations in older words, experts in four bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.shared.architectures import positions
from runtime.shared.projections import has_experts, lora_targets
from runtime.trainer.policy import Policy
from tests.runtime.families import FAMILIES, family_folder
from tests.runtime.trainer_fixtures import lone_hidden, our_logits, trained_policy

TOKENS = torch.arange(100) % 90 + 3
WEIGHTS = "model.safetensors"
# transformers' own list, as gpt-oss-20b has it.
_IN_FULL = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_as_transformers_4_wrote_it_means_the_same_model(name: str, tmp_path: Path) -> None:
    folder = copied(family_folder(name), tmp_path / "older")
    config = json.loads((folder / "config.json").read_text())
    older = in_older_words(config)
    assert "rope_parameters" not in older
    (folder / "config.json").write_text(json.dumps(older))
    assert torch.equal(
        our_logits(trained_policy(model=folder), TOKENS),
        our_logits(trained_policy(model=family_folder(name)), TOKENS),
    )
    assert lora_targets(older) == FAMILIES[name].targets
    assert has_experts(older) == has_experts(config)
    assert positions(older) == positions(config)


def in_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` at the top, the stretch in `rope_scaling`; of two rotations the local base by itself."""
    older = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    said = dict(config["rope_parameters"])
    if "full_attention" in said:
        older["rope_local_base_freq"] = said["sliding_attention"]["rope_theta"]
        said = dict(said["full_attention"])
    if config["model_type"] == "gemma3_text":
        older["sliding_window_pattern"] = 2
    if config["model_type"] == "qwen3_moe":
        older["num_experts"] = older.pop("num_local_experts")
    if "dtype" in older:
        older["torch_dtype"] = older.pop("dtype")
    if "partial_rotary_factor" in said:
        older["partial_rotary_factor"] = said.pop("partial_rotary_factor")
    older["rope_theta"] = said.pop("rope_theta")
    return older | ({"rope_scaling": said} if said["rope_type"] != "default" else {})


def test_experts_in_four_bits_are_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    """gpt-oss is published so (MXFP4); bf16 holds each of the values exactly."""
    packed, plain = four_bits(tmp_path / "packed", tmp_path / "plain")
    found, expected = (trained_policy("bfloat16", model=folder) for folder in (packed, plain))
    assert torch.equal(our_logits(found, TOKENS), our_logits(expected, TOKENS))
    found.output(lone_hidden(found, TOKENS)).float().pow(2).mean().backward()
    assert_trains(found)


def assert_trains(policy: Policy) -> None:
    """A gradient reaches every matrix, through the experts too."""
    policy.collect_gradients()
    for name, master in policy.master_weights.items():
        assert master.grad is not None, name
        assert float(master.grad.abs().max()) > 0, name


def four_bits(packed: Path, plain: Path) -> tuple[Path, Path]:
    """A gpt-oss whose experts are random blocks of four-bit numbers, and the same in plain numbers."""
    copied(family_folder("gpt-oss"), packed)
    copied(family_folder("gpt-oss"), plain)
    generator = torch.Generator().manual_seed(0)
    stored = load_file(packed / WEIGHTS)
    meant = dict(stored)
    for name, weight in list(stored.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, into, out = weight.shape
            blocks = torch.randint(0, 256, (experts, out, into // 32, 16), generator=generator)
            scales = torch.randint(121, 125, (experts, out, into // 32), generator=generator)
            del stored[name]
            stored[f"{name}_blocks"] = blocks.to(torch.uint8)
            stored[f"{name}_scales"] = scales.to(torch.uint8)
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert meant[name].shape == weight.shape
    save_file(stored, packed / WEIGHTS, metadata={"format": "pt"})
    save_file(meant, plain / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _IN_FULL}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
