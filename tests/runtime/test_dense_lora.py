"""The dense LoRA path on CPU against vLLM's own (runtime/engine/worker.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vLLM

SLOTS, RANK, INPUT, SLICES = 4, 8, 12, (16, 4, 4)
ADAPTERS = [11, None, 7, 5]  # adapter numbers by slot; the last slot is in use


def run(
    wrapper: type[Any], mapping: list[int], slots_in_use: int = SLOTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """y before and after one fused projection; `mapping` is each token's adapter number, 0 for none."""
    from vllm.lora.layers import LoRAMapping

    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUT, generator=generator) for _ in SLICES)
    b = tuple(torch.randn(SLOTS, 1, size, RANK, generator=generator) for size in SLICES)
    for matrix in (*a, *b):
        matrix[slots_in_use:] = 0
    x = torch.randn(len(mapping), INPUT, generator=generator)
    y = torch.randn(len(mapping), sum(SLICES), generator=generator)
    before = y.clone()
    lora = wrapper(max_num_batched_tokens=64, max_batches=64, device="cpu")
    lora.update_metadata(
        LoRAMapping(tuple(mapping), tuple(mapping), is_prefill=True), ADAPTERS, SLOTS + 1, 99
    )
    lora.add_lora_linear(y, x, a, b, 1.0, SLICES)
    return before, y


@pytest.mark.parametrize(
    "mapping",
    [[7] * 9, [11], [7, 7, 11, 11, 11, 7], [5, 7, 11, 5, 7, 11]],
    ids=["one adapter", "one token", "two adapters", "interleaved"],
)
def test_batches_of_adapters_agree_with_vllms_own_path(mapping: list[int]) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from runtime.engine.worker import DenseLora

    before, dense = run(DenseLora, mapping)
    _, stock = run(PunicaWrapperCPU, mapping)
    torch.testing.assert_close(dense, stock, rtol=1e-5, atol=1e-5)
    assert not torch.equal(dense, before)


def test_batches_that_mix_adapters_with_the_base_agree_where_the_last_slot_is_empty() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from runtime.engine.worker import DenseLora

    mapping = [0, 7, 7, 0, 11, 0, 0, 7]
    _, dense = run(DenseLora, mapping, slots_in_use=3)
    _, stock = run(PunicaWrapperCPU, mapping, slots_in_use=3)
    torch.testing.assert_close(dense, stock, rtol=1e-5, atol=1e-5)


def test_the_base_is_left_alone_whatever_else_is_in_the_batch() -> None:
    from runtime.engine.worker import DenseLora

    for mapping in ([0, 0, 0], [0, 7, 5, 0, 11]):
        before, after = run(DenseLora, mapping)
        rows = [index for index, adapter in enumerate(mapping) if adapter == 0]
        assert torch.equal(after[rows], before[rows])


def test_vllms_own_path_gives_the_base_the_last_slots_adapter() -> None:
    """Why ours must not fall back to it for mixed batches. When this fails, vLLM has mended it."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    before, after = run(PunicaWrapperCPU, [0, 7])
    assert not torch.equal(after[0], before[0])
