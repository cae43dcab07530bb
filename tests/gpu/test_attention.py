"""FlexAttention's own kernels over trees: the mask of whole rows, value by value, and their memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.trainer.attention import AttentionPattern, BlockSparseMask, DenseMask
from runtime.trainer.forward import sequences
from runtime.trainer.packing import Pack, pack
from tests.gpu.training import long_batch
from tests.support.measured import say


@dataclass(frozen=True)
class Heads:
    """What a layer looks at: query heads, key heads, their width, and what its family adds."""

    query: int = 16
    key: int = 8
    width: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Inputs:
    """Of one layer, in fp32; `weight` is what the answer's gradient is."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    sinks: Tensor | None

    @classmethod
    def random(cls, heads: Heads, rows: int, length: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(0)

        def drawn(count: int) -> Tensor:
            return torch.randn(rows, count, length, heads.width, device="cuda", generator=generator)

        sinks = torch.randn(heads.query, device="cuda", generator=generator) if heads.sinks else None
        return cls(drawn(heads.query), drawn(heads.key), drawn(heads.key), drawn(heads.query), sinks)


def one_pack(seed: int, **shape: int) -> Pack:
    batch = long_batch(seed, **shape)
    return pack(sequences(batch), range(batch.sequences), 4096, fixed_rows=True)[0]


def blocks(one: Pack) -> BlockSparseMask:
    return BlockSparseMask(one.tree_BL.cuda(), one.branch_BL.cuda(), one.positions_BL.cuda())


def masked(one: Pack) -> DenseMask:
    return DenseMask(one.mask_BLL().cuda(), one.positions_BL.cuda())


def attended(seen: AttentionPattern, inputs: Inputs, heads: Heads, dtype: torch.dtype) -> dict[str, Tensor]:
    """The answer, and the gradients of what went in."""
    leaves = {
        name: getattr(inputs, name).to(dtype).detach().requires_grad_() for name in ("query", "key", "value")
    }
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    found = seen.attend(
        leaves["query"], leaves["key"], leaves["value"],
        scale=heads.width**-0.5, window=heads.window, softcap=heads.softcap, sinks_H=sinks,
    )  # fmt: skip
    found.backward(inputs.weight.to(found.dtype))
    gradients = {name: leaf.grad for name, leaf in leaves.items()} | (
        {} if sinks is None else {"sinks": sinks.grad}
    )
    return {"answer": found.detach(), **{name: grad for name, grad in gradients.items() if grad is not None}}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each, in shares of its largest value."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].float() - value.float()).abs().max() / value.float().abs().max())
        for name, value in expected.items()
    }


@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(query=28, key=4),
        Heads(query=12, key=2),
        Heads(query=32, key=32, width=96),
        Heads(width=64, window=200),
        Heads(width=256, softcap=50.0, query=8, key=4),
        Heads(query=64, key=8, width=64, window=128, sinks=True),
    ],
    ids=["qwen3", "qwen2.5-7b", "qwen2.5-1.5b", "phi3", "window", "gemma", "gpt-oss"],
)
def test_the_kernels_are_as_near_to_fp32_as_the_mask_is(
    heads: Heads, card: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    torch.set_float32_matmul_precision("highest")
    one = one_pack(1, groups=3, members=3, prompt=200, answer=150)
    inputs = Inputs.random(heads, *one.tokens_BL.shape)
    expected = attended(masked(one), inputs, heads, torch.float32)
    by_mask = worst(attended(masked(one), inputs, heads, torch.bfloat16), expected)
    by_kernel = worst(attended(blocks(one), inputs, heads, torch.bfloat16), expected)
    say(
        "attention: largest error in bf16",
        family=request.node.callspec.id,
        mask=by_mask,
        kernel=by_kernel,
        **card,
    )
    for name, error in by_kernel.items():
        assert error < 2 * by_mask[name] + 5e-3, (name, by_kernel, by_mask)


def seconds(act: Callable[[], object], rounds: int = 5) -> float:
    act()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(rounds):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / rounds


def test_rows_of_every_fixed_length_stay_in_the_kernels(card: dict[str, Any]) -> None:
    """What torch does not compile becomes plain operations, with a score for every pair of a row."""
    heads = Heads(query=8, key=2, width=64)
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        inputs = Inputs.random(heads, 1, length)
        tree = torch.zeros(1, length, dtype=torch.long, device="cuda")
        seen = BlockSparseMask(tree, tree, torch.arange(length, device="cuda")[None])
        for window in (None, 256):
            of_layer = Heads(query=8, key=2, width=64, window=window)
            with torch.no_grad():
                seen.attend(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    scale=1.0,
                    window=window,
                    softcap=None,
                    sinks_H=None,
                )
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attended(seen, inputs, of_layer, torch.bfloat16)
            peak = torch.cuda.max_memory_allocated() - before
            scores = heads.query * length**2 * 4
            assert length < 4096 or peak < scores / 4, f"row {length}, window {window}: {peak:,} bytes"
    say(
        "attention: one layer forward and backward, row of 32768",
        peak_bytes=peak,
        scores_bytes=scores,
        **card,
    )


def test_how_long_a_layer_takes(card: dict[str, Any]) -> None:
    heads, one = Heads(), one_pack(2, groups=1, members=8, prompt=1024, answer=384)
    inputs = Inputs.random(heads, *one.tokens_BL.shape)
    by_kernel, by_mask = blocks(one), masked(one)
    took = {
        "kernel": seconds(lambda: attended(by_kernel, inputs, heads, torch.bfloat16)),
        "mask": seconds(lambda: attended(by_mask, inputs, heads, torch.bfloat16)),
    }
    say("attention: seconds of one layer, forward and backward", places=one.tokens_BL.numel(), **took, **card)
    assert took["kernel"] < took["mask"]
