"""How many kernels attention asks torch for: one for each shape, and never plain operations in their place.

The kernels themselves are `tests/gpu`'s; here what dynamo hands to a backend is counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from runtime.shared.fixed_row_lengths import fixed_length
from runtime.trainer import attention
from runtime.trainer.attention import BlockSparseMask
from runtime.trainer.packing import PADDING

BUDGET = 512
TABLES = [
    f"{whole}{side}_{kind}"
    for whole in ("", "full_")
    for side in ("kv", "q")
    for kind in ("num_blocks", "indices")
]


def lengths() -> list[int]:
    """Of the fixed rows of a budget, and of sequences that are longer."""
    return sorted({fixed_length(needed, BUDGET) for needed in (1, 200, 600)})


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What was compiled of FlexAttention before counts for its limit."""
    torch.compiler.reset()


def test_every_fixed_length_window_and_pass_has_its_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    counter = CompileCounter()
    kernel = attention.compiled(counter)
    monkeypatch.setattr(attention, "_kernel", lambda device: kernel)
    kinds = [
        (length, window, grad) for length in lengths() for window in (None, 64) for grad in (True, False)
    ]
    assert len(kinds) > torch._dynamo.config.recompile_limit, "torch's own limit would do"
    for _ in range(2):
        for length, window, grad in kinds:
            tree = torch.zeros(1, length, dtype=torch.long)
            blocks = BlockSparseMask(tree, tree.clone(), torch.arange(length)[None])
            query = torch.randn(1, 4, length, 16, requires_grad=grad)
            key = torch.randn(1, 2, length, 16, requires_grad=grad)
            with torch.set_grad_enabled(grad):
                blocks.attend(query, key, key, scale=0.25, window=window, softcap=None, sinks_H=None)
        assert counter.frame_count == len(kinds)


def test_past_the_limit_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_GRAPHS", 1)
    kernel = attention.compiled(CompileCounter())
    short, long = (torch.randn(1, 2, length, 16) for length in (128, 256))
    kernel(short, short, short)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        kernel(long, long, long)


@pytest.mark.parametrize("window", [None, 16, 200])
def test_block_masks_are_torchs_own_and_never_made_of_whole_rows(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_PAIRS_AT_ONCE", 2 * 128 * 640)
    places = torch.arange(640)
    tree = torch.stack([places // 250, torch.where(places < 600, 0, PADDING)])
    branch = torch.where(places < 260, 0, 1 + places // 60).repeat(2, 1)
    blocks = BlockSparseMask(tree, branch, places.repeat(2, 1))
    asked = []
    make = attention._block_mask

    def watched(sees: Any, *shape: Any) -> Any:
        def counting(row: torch.Tensor, head: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            found = sees(row, head, i, j)
            asked.append(found.numel())
            return found

        return make(counting, *shape)

    monkeypatch.setattr(attention, "_block_mask", watched)
    found = blocks.mask(window)
    assert len(asked) == 5 and max(asked) <= 2 * 128 * 640, "a mask of whole rows"
    expected = create_block_mask(found.mask_mod, 2, None, 640, 640, device="cpu", BLOCK_SIZE=128)
    assert found.shape == expected.shape
    for table in TABLES:
        assert torch.equal(getattr(found, table), getattr(expected, table)), table
    assert window is not None or int(found.full_kv_num_blocks.sum()) > 0, "no block is seen whole"
