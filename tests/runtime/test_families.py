"""Each family against transformers and peft: logits of packed trees, gradients, adapters there and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.shared.batch import Batch
from runtime.shared.peft_format import WEIGHTS
from runtime.trainer.attention import BlockSparseMask
from runtime.trainer.forward import sequences
from runtime.trainer.packing import Pack, pack
from runtime.trainer.policy import Lora, Policy
from tests.runtime.families import FAMILIES, WINDOW, family_folder
from tests.runtime.trainer_fixtures import (
    LORA,
    fresh_policy,
    make_batch,
    our_logits,
    random_samples,
    trained_policy,
)

TOKENS = torch.arange(100) % 90 + 3
WINDOWED = [name for name, family in FAMILIES.items() if family.windowed]
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@functools.cache
def trees() -> tuple[Batch, list[Pack]]:
    """Trees of several turns beside one another, prompts and answers longer than a window, padding."""
    samples = [
        replace(one, group=group)
        for group, shape in enumerate(
            (
                {"members": 3, "prompt": 40, "completion": 8, "turns": 2},
                {"members": 2, "prompt": 12, "completion": 40},
                {"members": 2, "prompt": 20, "completion": 6, "turns": 2},
                {"members": 1, "prompt": 9, "completion": 12},
            )
        )
        for one in random_samples(41 + group, groups=1, **shape)
    ]
    batch = make_batch(samples)
    packs = pack(sequences(batch), range(batch.sequences), 384)
    rows = [row[row >= 0] for one in packs for row in one.tree_BL]
    assert any(len(row.unique()) > 1 for row in rows), "no row has several trees"
    assert any(len(row) < packs[0].tree_BL.shape[1] for row in rows), "no row has padding"
    return batch, packs


def packed_logits(policy: Policy) -> Iterator[tuple[Pack, Tensor]]:
    """Each pack, and the logits [T, V] that predict its sampled tokens."""
    for one in trees()[1]:
        hidden = policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
        yield one, policy.output(hidden[one.row_T, one.place_T])


def in_batch_order(found: Iterator[tuple[Pack, Tensor]]) -> Tensor:
    """[N, V] over the batch's sampled tokens."""
    parts = list(found)
    order = torch.cat([one.source_T for one, _ in parts]).argsort()
    return torch.cat([logits for _, logits in parts])[order]


def lone_logits(model: torch.nn.Module) -> Tensor:
    """The same by another model, which sees one sequence at a time."""
    batch = trees()[0]
    found = []
    for sample in range(batch.sequences):
        span = batch.span(sample)
        logits = model(torch.from_numpy(batch.tokens[span]).long()[None]).logits[0]
        found.append(logits[np.flatnonzero(batch.sampled[span]) - 1])
    return torch.cat(found)


def plain(folder: Path) -> Any:
    """transformers, with the attention that leaves nothing of a family out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def with_peft(folder: Path, adapter: Path, *, trained: bool = False) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(plain(folder), str(adapter), is_trainable=trained).eval()


@TIED
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_c41_a_packed_tree_has_the_logits_that_transformers_has_for_each_sequence(
    name: str, tied: bool
) -> None:
    folder = family_folder(name, tied=tied)
    policy = trained_policy(model=folder)
    with policy.reference():
        found = in_batch_order(packed_logits(policy))
    torch.testing.assert_close(found, lone_logits(plain(folder)), atol=1e-4, rtol=0)
    adapted = in_batch_order(packed_logits(policy))
    assert float((adapted - found).abs().max()) > 0.05, "the adapter does nothing"


@TIED
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_c23_an_adapter_of_any_family_is_exact_in_peft_and_comes_back_bit_for_bit(
    name: str, tied: bool, tmp_path: Path
) -> None:
    assert_round_trip(family_folder(name, tied=tied), LORA, FAMILIES[name].targets, tmp_path)


CHOSEN = {
    "rank-stabilised": ("qwen3", Lora(4, 12.0, use_rslora=True)),
    "two of seven": ("mistral", Lora(4, 12.0, target_modules=("v_proj", "q_proj"))),
    "one that is fused": ("phi3", Lora(4, 12.0, target_modules=("qkv_proj",))),
    "both": ("gemma3", Lora(3, 5.0, use_rslora=True, target_modules=("down_proj", "o_proj"))),
}


@pytest.mark.parametrize(("name", "lora"), CHOSEN.values(), ids=CHOSEN)
@torch.no_grad()
def test_c23_an_adapter_as_it_was_chosen_is_exact_in_peft_and_comes_back_bit_for_bit(
    name: str, lora: Lora, tmp_path: Path
) -> None:
    assert_round_trip(family_folder(name), lora, lora.target_modules or FAMILIES[name].targets, tmp_path)


def assert_round_trip(folder: Path, lora: Lora, targets: tuple[str, ...], scratch: Path) -> None:
    """Ours to peft, which computes the same; its own copy of that back to us."""
    policy = trained_policy(lora=lora, model=folder)
    policy.export_adapter(scratch / "ours", "tiny")
    model = with_peft(folder, scratch / "ours")
    assert model.peft_config["default"].target_modules == set(targets)
    torch.testing.assert_close(in_batch_order(packed_logits(policy)), lone_logits(model), atol=1e-4, rtol=0)
    model.save_pretrained(scratch / "theirs")
    again = fresh_policy(lora=lora, model=folder)
    again.import_adapter(scratch / "theirs")
    assert again.master_weights.keys() == policy.master_weights.keys()
    assert all(
        torch.equal(again.master_weights[name], master) for name, master in policy.master_weights.items()
    )
    ours, theirs = load_file(scratch / "ours" / WEIGHTS), load_file(scratch / "theirs" / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 2 * len(targets), "A and B of each target in two layers"


@pytest.mark.parametrize("name", FAMILIES)
def test_c41_gradients_of_packed_trees_are_those_of_peft_on_each_sequence(name: str, tmp_path: Path) -> None:
    folder = family_folder(name)
    policy = trained_policy(model=folder)
    policy.export_adapter(tmp_path, "tiny")
    found = in_batch_order(packed_logits(policy))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5)) / found.numel() ** 0.5
    (found * weights).sum().backward()
    policy.collect_gradients()
    model = with_peft(folder, tmp_path, trained=True)
    (lone_logits(model) * weights).sum().backward()
    theirs = {
        name: weight.grad
        for name, weight in model.named_parameters()
        if "lora_" in name and weight.grad is not None
    }
    assert len(theirs) == len(policy.master_weights)
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert scale > 1e-2, "the gradient is nothing"
    for ours, master in policy.master_weights.items():
        expected = theirs[peft_parameter(ours)]
        assert master.grad is not None
        assert float((master.grad - expected).abs().max()) <= 1e-4 * scale, ours


def peft_parameter(master: str) -> str:
    side = "A" if ".lora_a." in master else "B"
    return f"base_model.model.{master.replace(f'.lora_{side.lower()}.', f'.lora_{side}.default.')}"


@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_a_window_shorter_than_a_row_changes_what_comes_after_it_and_nothing_before(name: str) -> None:
    short, long = (
        our_logits(trained_policy(model=family_folder(name, **changes)), TOKENS)
        for changes in ({}, {"sliding_window": len(TOKENS)})
    )
    torch.testing.assert_close(short[:WINDOW], long[:WINDOW], atol=1e-5, rtol=0)
    assert float((short - long)[WINDOW:].abs().max()) > 0.05


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].windowed or name == "granite"])
@torch.no_grad()
def test_blocks_of_a_tree_are_attended_as_its_mask_is(name: str) -> None:
    """FlexAttention, as on a GPU: windows, softcaps, sinks and scales of every family that has them."""
    policy = trained_policy(model=family_folder(name))
    for one in trees()[1]:
        masked = policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
        blocks = BlockSparseMask(one.tree_BL, one.branch_BL, one.positions_BL)
        found = policy.hidden(one.tokens_BL, one.positions_BL, blocks)
        real = one.tree_BL >= 0
        torch.testing.assert_close(found[real], masked[real], atol=1e-5, rtol=1e-4)


@TIED
@pytest.mark.parametrize("name", FAMILIES)
def test_c32_a_tied_head_is_the_embeddings_and_an_untied_one_is_not(name: str, tied: bool) -> None:
    model: Any = fresh_policy(model=family_folder(name, tied=tied)).model
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embeddings) == tied
    assert not (head.requires_grad or embeddings.requires_grad)
