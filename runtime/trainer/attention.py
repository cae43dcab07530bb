"""Attention over rows that hold trees: a function that transformers' models call instead of their own.

Neighbours: `network.py` builds the models with it, `packing.py` lays the trees out, `policy.py` passes the
places that each place sees, per forward pass. Knows nothing of weights, adapters or losses.

There are two ways to the same values: masked softmax over a whole row, for CPUs; and FlexAttention for GPUs,
whose block mask skips unseen blocks and never stores a mask of a whole row.

Names carry dimensions: B rows, L places of a row, H heads, K key heads, W the width of a head.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from runtime.shared.architectures import PolicyError

# Arguments of models, beside these, that change no attention of a forward pass without a cache.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict", "is_causal"}
)
_BLOCK = 128
# Lengths of fixed rows (shared/fixed_row_lengths.py), windows of a model, passes with gradients and without:
# twice as many as for the longest contexts, and as many as torch takes of one function.
_MAX_KERNELS = 256


class AttentionPattern(Protocol):
    """The places that each place of a micro-batch of rows sees."""

    def attend(
        self,
        query_BHLW: Tensor,
        key_BKLW: Tensor,
        value_BKLW: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Attention's answer [B, H, L, W]; with a window, of places less than so many positions back."""
        ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    seen: AttentionPattern | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of an attention function; [B, L, H, W]. Raises PolicyError for an argument it
    does not support.

    `seen` comes from the caller of the whole model, through the keywords that every layer passes on. Dropout
    is never applied: tokens that were sampled without it must have the same probability here (C29).
    """
    odd = sorted(name for name, given in rest.items() if name not in _WITHOUT_EFFECT and given is not None)
    if odd or attention_mask is not None:
        what = ", ".join(odd) or "a mask of its own"
        raise PolicyError(f"{type(module).__name__} asks attention for {what}, which is not supported")
    if seen is None:
        raise PolicyError(
            f"{type(module).__name__} is not told what each place sees: its model passes no keywords on"
        )
    found = seen.attend(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return found.transpose(1, 2).contiguous(), None


class DenseMask:
    """A boolean mask of whole rows, with the position of each place. All other ways must give the same
    result."""

    def __init__(self, mask_BLL: Tensor, positions_BL: Tensor) -> None:
        self._positions_BL = positions_BL
        self._by_window: dict[int | None, Tensor] = {None: mask_BLL}

    def mask_BLL(self, window: int | None) -> Tensor:
        """The places that each place sees; with a window, only so many positions back, its own counted."""
        if window not in self._by_window:
            back_BLL = self._positions_BL[:, :, None] - self._positions_BL[:, None, :]
            self._by_window[window] = self._by_window[None] & (back_BLL < window)
        return self._by_window[window]

    def attend(
        self,
        query_BHLW: Tensor,
        key_BKLW: Tensor,
        value_BKLW: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """See Seen."""
        mask_B1LL = self.mask_BLL(window)[:, None]
        key_BHLW, value_BHLW = (_for_each_head(part, query_BHLW.shape[1]) for part in (key_BKLW, value_BKLW))
        if softcap is None and sinks_H is None:
            return functional.scaled_dot_product_attention(
                query_BHLW, key_BHLW, value_BHLW, attn_mask=mask_B1LL, scale=scale
            )
        score_BHLL = _capped((query_BHLW @ key_BHLW.transpose(2, 3)).float() * scale, softcap)
        score_BHLL = score_BHLL.masked_fill(~mask_B1LL, -torch.inf)
        if sinks_H is not None:  # a place that takes its share of the softmax and gives nothing
            rows = score_BHLL.shape
            sink_BHL1 = sinks_H.float().reshape(1, -1, 1, 1).expand(rows[0], rows[1], rows[2], 1)
            score_BHLL = torch.cat([score_BHLL, sink_BHL1], dim=-1)
        share_BHLL = score_BHLL.softmax(-1)[..., : key_BHLW.shape[2]]
        return share_BHLL.to(value_BHLW.dtype) @ value_BHLW


class BlockSparseMask:
    """Trees as FlexAttention's block mask, one for each window that a layer of the model has.

    `tree_BL`, `branch_BL`, `positions_BL`: as a Pack has them.
    """

    def __init__(self, tree_BL: Tensor, branch_BL: Tensor, positions_BL: Tensor) -> None:
        self._tree_BL = tree_BL
        self._branch_BL = branch_BL
        self._positions_BL = positions_BL
        self._by_window: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """The blocks with anything to see in them, and the rule inside them."""
        if window not in self._by_window:
            self._by_window[window] = self._make(window)
        return self._by_window[window]

    def _make(self, window: int | None) -> BlockMask:
        tree_BL, branch_BL, positions_BL = self._tree_BL, self._branch_BL, self._positions_BL

        def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same_tree = tree_BL[row, i] == tree_BL[row, j]
            branch_j = branch_BL[row, j]
            visible = same_tree & ((branch_j == 0) | (branch_BL[row, i] == branch_j)) & (j <= i)
            if window is None:
                return visible
            return visible & (positions_BL[row, i] - positions_BL[row, j] < window)

        rows, length = tree_BL.shape
        device = tree_BL.device
        return _mask_maker(device.type)(sees, rows, None, length, length, device=device, BLOCK_SIZE=_BLOCK)

    def attend(
        self,
        query_BHLW: Tensor,
        key_BKLW: Tensor,
        value_BKLW: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """See Seen."""

        def score(found: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return _capped(found, softcap)

        key_BHLW, value_BHLW = key_BKLW, value_BKLW
        heads = query_BHLW.shape[1]
        grouped = heads & (heads - 1) == 0  # the kernel groups powers of two
        if not grouped:
            key_BHLW, value_BHLW = (_for_each_head(part, heads) for part in (key_BKLW, value_BKLW))
        found_BHLW, beside = _kernel(query_BHLW.device.type)(
            query_BHLW,
            key_BHLW,
            value_BHLW,
            score_mod=None if softcap is None else score,
            block_mask=self.mask(window),
            scale=scale,
            enable_gqa=grouped,
            return_aux=AuxRequest(lse=sinks_H is not None),
        )
        if sinks_H is None:
            return found_BHLW
        share_BHL = torch.sigmoid(beside.lse - sinks_H.float().reshape(1, -1, 1))
        return found_BHLW * share_BHL[..., None].to(found_BHLW.dtype)


@functools.cache
def _kernel(device: str) -> Any:
    """FlexAttention, compiled if it has kernels."""
    return compiled() if device == "cuda" else flex_attention


@functools.cache
def _mask_maker(device: str) -> Any:
    """Compiled where rows are so long that a mask of whole ones, on the way to its blocks, is too large."""
    return compiled_masks() if device == "cuda" else create_block_mask


def compiled_masks(backend: Any = "inductor") -> Any:
    """A few kinds for each window and kind of pass; limits as below."""
    return torch.compile(create_block_mask, backend=backend, fullgraph=True, recompile_limit=_MAX_KERNELS)


def compiled(backend: Any = "inductor") -> Any:
    """For each length of rows, window and kind of pass once. Past torch's own limit of 8 it would write down
    the scores of whole rows, in silence; past ours it is an error."""
    return torch.compile(
        flex_attention, backend=backend, dynamic=False, fullgraph=True, recompile_limit=_MAX_KERNELS
    )


def _for_each_head(part_BKLW: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for the heads that share them."""
    rows, key_heads, length, width = part_BKLW.shape
    if key_heads == heads:
        return part_BKLW
    shared = (rows, key_heads, heads // key_heads, length, width)
    return part_BKLW[:, :, None].expand(shared).reshape(rows, heads, length, width)


def _capped(score: Tensor, softcap: float | None) -> Tensor:
    return score if softcap is None else softcap * torch.tanh(score / softcap)
