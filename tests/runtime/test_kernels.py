"""How many kernels attention asks torch for: one for each shape, and never plain operations in their place.

The kernels themselves are `tests/gpu`'s; here what dynamo hands to a backend is counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from runtime.shared.fixed_row_lengths import fixed_length
from runtime.trainer import attention
from runtime.trainer.attention import BlockSparseMask

BUDGET = 512


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
    monkeypatch.setattr(attention, "_MAX_KERNELS", 1)
    kernel = attention.compiled(CompileCounter())
    short, long = (torch.randn(1, 2, length, 16) for length in (128, 256))
    kernel(short, short, short)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        kernel(long, long, long)


def test_block_masks_are_never_made_of_whole_rows_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows beside whole attention, from the first length, which is one block, on."""
    maker = attention.compiled_masks("eager")
    monkeypatch.setattr(attention, "_mask_maker", lambda device: maker)
    whole_rows = []
    make = flex_attention.create_mask

    def watched(*args: Any, **named: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            whole_rows.append(args)
        return make(*args, **named)

    monkeypatch.setattr(flex_attention, "create_mask", watched)
    for grad in (False, True):
        for length in (128, 512, 1024):
            tree = torch.zeros(1, length, dtype=torch.long)
            blocks = BlockSparseMask(tree, tree.clone(), torch.arange(length)[None])
            with torch.set_grad_enabled(grad):
                for window in (None, 16, 64):
                    assert blocks.mask(window).shape == (1, 1, length, length)
    assert not whole_rows, f"{len(whole_rows)} masks of whole rows"
