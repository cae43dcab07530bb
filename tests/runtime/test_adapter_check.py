"""Comparing an engine's LoRA tensors with the file (runtime/engine/adapter_check.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.engine.adapter_check import FUSED, Pair, compare
from tests.runtime.adapters import change, write_adapter
from tests.runtime.conftest import TINY_MODEL

SLOTS_RANK = 32  # an engine's slots are as wide as its largest rank


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", TINY_MODEL, seed=1, alpha=32)


def held_by_an_engine(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, list[Pair]]:
    """What an engine that loaded the folder rightly has in its slots, written down independently."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    held: dict[str, list[Pair]] = {}
    for layer in range(4):
        for block, modules in (("self_attn", ("qkv_proj", "o_proj")), ("mlp", ("gate_up_proj", "down_proj"))):
            for module in modules:
                pairs = []
                for part in FUSED.get(module, (module,)):
                    name = f"base_model.model.model.layers.{layer}.{block}.{part}"
                    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
                    wide = Pair(torch.zeros(SLOTS_RANK, a.shape[1]), torch.zeros(b.shape[0], SLOTS_RANK))
                    wide.a[: a.shape[0]] = a
                    wide.b[:, : b.shape[1]] = b * (config["lora_alpha"] / config["r"])
                    pairs.append(Pair(wide.a.to(dtype), wide.b.to(dtype)))
                held[f"model.layers.{layer}.{block}.{module}"] = pairs
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_a_rightly_loaded_adapter_is_exact(adapter: Path, dtype: torch.dtype) -> None:
    report = compare(held_by_an_engine(adapter, dtype), adapter)
    assert report["mismatched"] == []
    assert report["modules"] == report["expected"] == 28


def test_c23_engine_swapped_gate_and_up_are_detected(adapter: Path) -> None:
    held = held_by_an_engine(adapter)
    held["model.layers.2.mlp.gate_up_proj"].reverse()
    said = compare(held, adapter)["mismatched"]
    assert {line.split(":")[0] for line in said} == {
        f"model.layers.2.mlp.{part}.lora_{side}" for part in ("gate_proj", "up_proj") for side in "AB"
    }


def test_c23_engine_swapped_q_and_k_heads_are_detected(adapter: Path) -> None:
    held = held_by_an_engine(adapter)
    b = held["model.layers.0.self_attn.qkv_proj"][0].b
    b.copy_(torch.cat([b[16:32], b[:16], b[32:]]))  # as an export permuted for another rotary layout has it
    assert compare(held, adapter)["mismatched"] == [
        "model.layers.0.self_attn.q_proj.lora_B: the engine's differs from the file's"
    ]


def test_c23_engine_a_missing_module_is_detected(adapter: Path) -> None:
    held = held_by_an_engine(adapter)
    for slot in held["model.layers.3.mlp.down_proj"]:
        slot.a.zero_()
        slot.b.zero_()
    report = compare(held, adapter)
    assert (report["modules"], report["expected"]) == (27, 28)
    assert len(report["mismatched"]) == 2


def test_c23_engine_what_the_slot_kept_from_another_adapter_is_detected(
    adapter: Path, tmp_path: Path
) -> None:
    fewer = change(adapter, tmp_path / "fewer", lambda tensors, _: _drop(tensors, "layers.1.mlp.up_proj"))
    report = compare(held_by_an_engine(adapter), fewer)
    assert (report["modules"], report["expected"]) == (28, 27)
    assert report["mismatched"] == ["model.layers.1.mlp.up_proj: not in the file, yet the engine holds it"]


def test_c23_engine_leftovers_beyond_the_rank_are_detected(adapter: Path) -> None:
    held = held_by_an_engine(adapter)
    held["model.layers.0.mlp.down_proj"][0].a[20, 3] = 1e-6
    assert len(compare(held, adapter)["mismatched"]) == 1


@pytest.mark.parametrize("alpha", [16, 64])
def test_c23_engine_a_wrong_alpha_is_detected(adapter: Path, tmp_path: Path, alpha: int) -> None:
    other = change(adapter, tmp_path / "other", lambda _, config: config.update(lora_alpha=alpha))
    said = compare(held_by_an_engine(adapter), other)["mismatched"]
    assert len(said) == 28
    assert all(".lora_B" in line for line in said)


def test_one_changed_bit_is_detected(adapter: Path) -> None:
    held = held_by_an_engine(adapter)
    value = held["model.layers.1.self_attn.o_proj"][0].b
    value[3, 5] = torch.nextafter(value[3, 5], torch.tensor(9.0))
    assert len(compare(held, adapter)["mismatched"]) == 1


def test_half_a_pair_and_strange_tensors_are_said(adapter: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
        del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
        tensors["base_model.model.lm_head.lora_embedding_A"] = torch.ones(2, 2)

    said = compare(held_by_an_engine(adapter), change(adapter, tmp_path / "spoilt", spoil))["mismatched"]
    assert any("only one of A and B" in line for line in said)
    assert any("not a LoRA matrix" in line for line in said)


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"alpha_pattern": {"q_proj": 4}}],
)
def test_an_adapter_that_is_more_than_a_and_b_is_not_exact(
    adapter: Path, tmp_path: Path, config: dict[str, object]
) -> None:
    other = change(adapter, tmp_path / "other", lambda _, said: said.update(config))
    assert compare(held_by_an_engine(adapter), other)["mismatched"]


def test_projections_that_the_file_has_fused_are_compared_as_one_in_one_slice_or_several(
    adapter: Path, tmp_path: Path
) -> None:
    """As Phi-3's: the file's gate_up_proj is one A, and one B with the rows of both."""

    def fuse(tensors: dict[str, torch.Tensor], _: dict[str, object]) -> None:
        for layer in range(4):
            name = f"base_model.model.model.layers.{layer}.mlp."
            b = [tensors.pop(f"{name}{part}.lora_B.weight") for part in FUSED["gate_up_proj"]]
            a = [tensors.pop(f"{name}{part}.lora_A.weight") for part in FUSED["gate_up_proj"]]
            tensors[f"{name}gate_up_proj.lora_A.weight"] = a[0]
            tensors[f"{name}gate_up_proj.lora_B.weight"] = torch.cat(b)

    fused = change(adapter, tmp_path / "fused", fuse)
    held = held_by_an_engine(adapter)
    for layer in range(4):
        gate, up = held[f"model.layers.{layer}.mlp.gate_up_proj"]
        up.a.copy_(gate.a)
    report = compare(held, fused)
    assert (report["modules"], report["expected"], report["mismatched"]) == (24, 24, [])
    for layer in range(4):
        gate, up = held[f"model.layers.{layer}.mlp.gate_up_proj"]
        held[f"model.layers.{layer}.mlp.gate_up_proj"] = [Pair(gate.a, torch.cat([gate.b, up.b]))]
    assert compare(held, fused)["mismatched"] == []
    held["model.layers.2.mlp.gate_up_proj"][0].b[90, 1] += 1
    assert len(compare(held, fused)["mismatched"]) == 1


def test_a_module_that_the_engine_names_otherwise_is_found_by_its_rename(adapter: Path) -> None:
    """As gpt-oss: `attn` where the file says `self_attn`."""
    held = {
        name.replace(".self_attn.", ".attn."): pairs for name, pairs in held_by_an_engine(adapter).items()
    }
    assert len(compare(held, adapter)["mismatched"]) > 16
    report = compare(held, adapter, lambda name: name.replace(".self_attn.", ".attn."))
    assert (report["modules"], report["expected"], report["mismatched"]) == (28, 28, [])


def test_c24_an_adapter_by_the_root_of_its_rank_is_compared_by_that_scale(
    adapter: Path, tmp_path: Path
) -> None:
    """alpha / sqrt(rank) is alpha / rank of another alpha: 4 times as much at rank 16."""
    by_root = change(adapter, tmp_path / "rslora", lambda _, config: config.update(use_rslora=True))
    same = change(adapter, tmp_path / "plain", lambda _, config: config.update(lora_alpha=128))
    assert len(compare(held_by_an_engine(adapter), by_root)["mismatched"]) == 28
    assert compare(held_by_an_engine(same), by_root)["mismatched"] == []


def _drop(tensors: dict[str, torch.Tensor], module: str) -> None:
    for name in [name for name in tensors if module in name]:
        del tensors[name]
