"""What a model folder may look like: shards, other files beside the weights, older configs, a hub's cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from runtime.trainer.policy import Policy, PolicyError, build, check_adapter_config, resolve
from tests.runtime.trainer_fixtures import (
    LORA,
    edited_model,
    fresh_policy,
    our_logits,
    tiny_model,
    trained_policy,
)

TOKENS = torch.arange(3, 60)
WEIGHTS = "model.safetensors"


def built(folder: Path) -> Policy:
    return build(folder, LORA, dtype="float32", device="cpu", seed=0)


def sharded(folder: Path) -> Path:
    """The tiny model in two shards and their index, as transformers saves what is large."""
    Qwen2ForCausalLM.from_pretrained(tiny_model()).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    return folder


def test_shards_are_the_same_model_as_one_file(tmp_path: Path) -> None:
    assert torch.equal(our_logits(built(sharded(tmp_path)), TOKENS), our_logits(fresh_policy(), TOKENS))


def test_other_weights_beside_the_model_are_not_read(tmp_path: Path) -> None:
    folder = edited_model(tmp_path / "model")
    wrong = {name: torch.zeros_like(weight) for name, weight in load_file(folder / WEIGHTS).items()}
    save_file(wrong, folder / "original.safetensors")
    assert torch.equal(our_logits(built(folder), TOKENS), our_logits(fresh_policy(), TOKENS))


def test_a_config_as_transformers_4_wrote_it_means_the_same(tmp_path: Path) -> None:
    """Qwen2.5 on the hub: `rope_theta` at the top, no `rope_parameters`."""
    folder = edited_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6, "use_sliding_window": False}))
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(folder)(TOKENS[None]).logits[0]
    ours = our_logits(built(folder), TOKENS)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)
    assert float((ours - our_logits(fresh_policy(), TOKENS)).abs().max()) > 1e-2, "the base of the rotation"


def test_untied_embeddings_stay_apart(tmp_path: Path) -> None:
    folder = edited_model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(folder / WEIGHTS)
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(folder)(TOKENS[None]).logits[0]
    torch.testing.assert_close(our_logits(built(folder), TOKENS), expected, atol=2e-4, rtol=1e-4)


def test_only_the_adapter_takes_memory_of_its_own_and_asks_for_gradients() -> None:
    policy = trained_policy()
    everything = [*policy.model.parameters(), *policy.model.buffers()]
    assert {value.device.type for value in everything} == {"cpu"}
    asking = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert asking == policy.master_weights.keys()


def test_a_hub_name_is_the_folder_the_hub_keeps_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own cache on disk, as a download leaves it; nothing is fetched."""
    import huggingface_hub.constants as constants

    kept = tmp_path / "models--org--tiny"
    shutil.copytree(tiny_model(), kept / "snapshots" / "0123abcd")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/tiny") == kept / "snapshots" / "0123abcd"
    assert resolve(str(tiny_model())) == tiny_model()


def test_a_folder_that_is_not_there_or_holds_no_weights_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no model folder"):
        resolve(str(tmp_path / "nowhere"))
    folder = edited_model(tmp_path / "model")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(PolicyError, match=r"no file named model\.safetensors"):
        built(folder)


@pytest.mark.parametrize("start", ["pissa", "olora", "loftq"])
def test_c27_an_adapter_that_took_a_part_of_the_base_is_refused(start: str, tmp_path: Path) -> None:
    fresh_policy().export_adapter(tmp_path, "tiny")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    with pytest.raises(PolicyError, match=start):
        check_adapter_config(config | {"init_lora_weights": start}, LORA)
