"""Checkpoints that see as well, as published: their language model is trained, exported and merged (C66)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from runtime.shared.architectures import PolicyError, check_trainable
from runtime.shared.language_model import MULTIMODAL, language_model
from runtime.shared.model_shape import shape
from runtime.shared.peft_format import WEIGHTS, tensor_shapes
from runtime.shared.projections import lora_targets
from runtime.trainer import merging
from tests.runtime.families import MULTIMODAL_FAMILIES, family_folder
from tests.runtime.trainer_fixtures import LORA, fresh_policy, our_logits, trained_policy

TOKENS = torch.arange(100) % 90 + 3
EVERY = pytest.mark.parametrize("name", MULTIMODAL_FAMILIES)
# google/gemma-3-4b-it's own, and what transformers makes of it where it says nothing.
GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def published(folder: Path) -> Any:
    """The whole model, as transformers loads it for images and text."""
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(input_ids=TOKENS[None]).logits[0]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@EVERY
def test_c66_the_language_model_has_the_published_models_logits_on_text(name: str, tied: bool) -> None:
    folder = family_folder(name, tied=tied)
    check_trainable(config_of(folder))
    ours = our_logits(fresh_policy(model=folder), TOKENS)
    torch.testing.assert_close(ours, logits_of(published(folder)), atol=1e-4, rtol=0)


@EVERY
def test_c66_an_adapter_is_exact_on_the_published_model_in_peft_and_comes_back_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    folder = family_folder(name)
    policy = trained_policy(model=folder)
    policy.export_adapter(tmp_path / "ours", "tiny")
    model = PeftModel.from_pretrained(published(folder), str(tmp_path / "ours")).eval()
    found = logits_of(model)
    torch.testing.assert_close(found, our_logits(policy, TOKENS), atol=1e-4, rtol=0)
    assert float((found - logits_of(published(folder))).abs().max()) > 0.05, "the adapter does nothing"
    model.save_pretrained(tmp_path / "theirs")
    again = fresh_policy(model=folder)
    again.import_adapter(tmp_path / "theirs")
    for own, master in policy.master_weights.items():
        assert torch.equal(again.master_weights[own], master), own


@EVERY
def test_c66_a_merged_checkpoint_is_the_published_one_with_the_adapter_in_its_language_model(
    name: str, tmp_path: Path
) -> None:
    folder = family_folder(name)
    policy = trained_policy(model=folder)
    policy.export_adapter(tmp_path / "adapter", "tiny")
    report = merging.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert report.layers == len(policy.master_weights) // 2
    merged = logits_of(published(tmp_path / "merged"))
    torch.testing.assert_close(merged, our_logits(policy, TOKENS), atol=1e-4, rtol=0)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    unchanged = [one for one in before if torch.equal(before[one], after[one])]
    assert len(unchanged) == len(before) - report.layers and any("vis" in one for one in unchanged)


def test_what_stands_beside_the_language_model_is_not_read_and_of_itself_nothing_may_be_missing(
    tmp_path: Path,
) -> None:
    """Qwen3.5 is published with the layers that guess several tokens; transformers has none for them."""
    folder = shutil.copytree(family_folder("qwen3.5"), tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    fresh_policy(model=folder)
    odd = "model.language_model.layers.0.mlp.fourth_proj.weight"
    save_file(tensors | {odd: torch.ones(2, 2)}, file, metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=r"not this model's: unexpected: .*fourth_proj"):
        fresh_policy(model=folder)
    left = {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(left, file, metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=r"not this model's: missing: .*layers\.1\.mlp\.up_proj"):
        fresh_policy(model=folder)


def test_c61_decay_rates_are_kept_in_fp32_as_vllm_keeps_them(tmp_path: Path) -> None:
    folder = family_folder("qwen3.5")
    name = "model.language_model.layers.0.linear_attn.A_log"
    stored = load_file(folder / "model.safetensors")[name]
    assert not torch.equal(stored, stored.bfloat16().float()), "it would show"
    policy = trained_policy("bfloat16", model=folder)
    held = dict(policy.model.named_parameters())["model.layers.0.linear_attn.A_log"]
    assert held.dtype == torch.float32 and torch.equal(held, stored)
    assert next(policy.model.parameters()).dtype == torch.bfloat16
    policy.export_adapter(tmp_path / "adapter", "tiny")
    merging.merge(folder, tmp_path / "adapter", tmp_path / "merged", "bfloat16")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged[name], stored)
    assert merged["model.language_model.embed_tokens.weight"].dtype == torch.bfloat16
    config = config_of(tmp_path / "merged")
    assert (config["dtype"], config["text_config"].get("dtype", "bfloat16")) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("tied", [True, False])
def test_whether_the_head_is_tied_is_as_the_published_config_says(tied: bool, tmp_path: Path) -> None:
    """Whatever its text_config says: transformers and vLLM take the published value too."""
    folder = shutil.copytree(family_folder("qwen3.5", tied=tied), tmp_path / "model")
    config = config_of(folder)
    config["text_config"]["tie_word_embeddings"] = not tied
    (folder / "config.json").write_text(json.dumps(config))
    found = shape(language_model(config))
    assert found is not None and found.tied == tied
    ours = our_logits(fresh_policy(model=folder), TOKENS)
    torch.testing.assert_close(ours, logits_of(published(folder)), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"text_config": None}, "its text_config is no object"),
        ({"architectures": [["a"]]}, "it holds other parts"),
        ({"auto_map": {"AutoModel": "m.My"}}, "auto_map"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        check_trainable(GEMMA_4B | changes)


def test_another_language_model_than_the_architectures_own_is_refused_by_name() -> None:
    odd = GEMMA_4B | {"text_config": GEMMA_4B["text_config"] | {"model_type": "gemma2"}}
    with pytest.raises(PolicyError, match="its language model is a gemma2, not a gemma3_text"):
        check_trainable(odd)


def test_a_published_config_leaves_out_what_transformers_knows() -> None:
    found = shape(language_model(GEMMA_4B))
    assert found is not None and (found.heads, found.key_heads, found.head_width) == (8, 4, 256)
    assert (found.vocabulary, found.tied, found.windows.count(None)) == (262208, True, 5)
    assert 3.8e9 < found.weights < 4.0e9


@EVERY
def test_the_shapes_of_an_adapter_are_known_without_the_weights(name: str, tmp_path: Path) -> None:
    folder = family_folder(name)
    config = language_model(config_of(folder))
    assert config["model_type"] == MULTIMODAL[config["architectures"][0]]
    assert lora_targets(config) == MULTIMODAL_FAMILIES[name].targets
    trained_policy(model=folder).export_adapter(tmp_path, "tiny")
    found = shape(config)
    assert found is not None
    stored = {one: list(value.shape) for one, value in load_file(tmp_path / WEIGHTS).items()}
    assert tensor_shapes(found, LORA.rank) == stored
