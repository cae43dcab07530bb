"""merging.py: an adapter merged into its base is the model that peft makes of the two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from runtime.shared.architectures import PolicyError
from runtime.trainer import merging
from tests.runtime.adapters import write_adapter

TINY = Path(merging.__file__).parents[1] / "tiny" / "model"
IDS = torch.tensor([[5, 17, 40, 8, 99, 3, 60]])


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float().log_softmax(-1)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", TINY, seed=1, rank=8, alpha=24)


def of_peft(adapter: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return logprobs(PeftModel.from_pretrained(base, str(adapter)).eval())


def in_two_files(base: Path, folder: Path) -> Path:
    """The same model as a hub has a large one: its weights in two files with an index."""
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_b19_a_merged_model_has_the_logprobs_of_peft(adapter: Path, tmp_path: Path) -> None:
    wanted = of_peft(adapter)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert (wanted - logprobs(base)).abs().max() > 0.1, "the adapter does something"
    for source in (TINY, in_two_files(TINY, tmp_path / "two")):
        merged = merging.merge(source, adapter, tmp_path / f"merged-{source.name}", "float32")
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged-{source.name}", dtype=torch.float32)
        torch.testing.assert_close(logprobs(found), wanted, atol=1e-4, rtol=0)
        assert merged.layers == 7 * found.config.num_hidden_layers and merged.rounding_loss == 0.0


def test_b19_what_a_rounding_takes_of_the_adapter_is_measured(tmp_path: Path) -> None:
    """Of a large change little is lost, of a small one much: so nothing is merged while it trains."""
    lost = []
    for size in (0.3, 1e-4):
        adapter = write_adapter(tmp_path / f"adapter-{size}", TINY, seed=1, size=size)
        merged = merging.merge(TINY, adapter, tmp_path / f"merged-{size}", "bfloat16")
        lost.append(merged.rounding_loss)
    assert lost[0] < 0.1 < 0.5 < lost[1]
    config = json.loads((tmp_path / "merged-0.3" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_b19_another_models_adapter_is_not_merged(adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.0", "layers.40"): value for name, value in tensors.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    with pytest.raises(PolicyError, match=r"has no model\.layers\.40"):
        merging.merge(TINY, adapter, tmp_path / "merged")
