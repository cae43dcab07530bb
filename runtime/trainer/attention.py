"""Attention over rows that hold trees: a function that transformers' models call instead of their own.

Neighbours: `network.py` builds the models with it, `packing.py` lays the trees out, `policy.py` passes the
places that each place sees, per forward pass. Knows nothing of weights, adapters or losses.

There are two ways to the same values: masked softmax over a whole row, for CPUs; and FlexAttention for GPUs,
whose block mask skips unseen blocks and never stores a mask of a whole row.

Names carry dimensions: B rows, L places of a row, H heads, K key heads, W the width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from runtime.shared.architectures import PolicyError
from runtime.trainer.compiling import MAX_GRAPHS

# Arguments of models, beside these, that change no attention of a forward pass without a cache.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "return_dict", "is_causal"}
)
_BLOCK = 128
# How many pairs of places are looked at together while blocks are made: 64 MiB of truth values.
_PAIRS_AT_ONCE = 2**26


class AttentionPattern(Protocol):
    """The places that each place of a micro-batch of rows sees."""

    def prepare(self, windows: Iterable[int | None]) -> None:
        """Make the masks of a model's windows, which a compiled layer only reads."""
        ...

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

    def prepare(self, windows: Iterable[int | None]) -> None:
        """See AttentionPattern."""
        for window in windows:
            self.mask_BLL(window)

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
        """See AttentionPattern."""
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
        return _block_mask(sees, rows, length, tree_BL.device)

    def prepare(self, windows: Iterable[int | None]) -> None:
        """See AttentionPattern."""
        for window in windows:
            self.mask(window)

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
        """See AttentionPattern."""

        def score(found: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return _capped(found, softcap)

        key_BHLW, value_BHLW = key_BKLW, value_BKLW
        heads = query_BHLW.shape[1]
        grouped = heads & (heads - 1) == 0  # the kernel groups powers of two
        if not grouped:
            key_BHLW, value_BHLW = (_for_each_head(part, heads) for part in (key_BKLW, value_BKLW))
        # Inside a compiled layer it is compiled with the layer.
        kernel = flex_attention if torch.compiler.is_compiling() else _kernel(query_BHLW.device.type)
        found_BHLW, beside = kernel(
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


def _block_mask(sees: Any, rows: int, length: int, device: torch.device) -> BlockMask:
    """The blocks in which `sees` holds for some pairs and for all, without a mask of whole rows on the way.

    torch's own maker has such a mask, or is compiled; compiled it sorts each row of blocks in one kernel,
    which takes minutes to compile for rows of 16,384.
    """
    blocks = -(-length // _BLOCK)
    row_B11 = torch.arange(rows, device=device)[:, None, None]
    place_L = torch.arange(length, device=device)
    at_once = max(1, _PAIRS_AT_ONCE // (rows * length * _BLOCK)) * _BLOCK
    counts = []
    for query_Q in place_L.split(at_once):
        pairs_BQL = sees(row_B11, None, query_Q[:, None], place_L)
        pairs_BQL = functional.pad(pairs_BQL, (0, blocks * _BLOCK - length, 0, -len(query_Q) % _BLOCK))
        counts.append(pairs_BQL.view(rows, -1, _BLOCK, blocks, _BLOCK).sum((2, 4)))
    count_B1QK = torch.cat(counts, dim=1)[:, None]
    whole_B1QK = count_B1QK == _BLOCK**2
    return BlockMask.from_kv_blocks(
        *_numbered((count_B1QK > 0) & ~whole_B1QK),
        *_numbered(whole_B1QK),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _numbered(chosen_B1QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has [B, 1, Q], and their numbers, those first [B, 1, Q, K]."""
    number_B1QK = chosen_B1QK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_B1QK.sum(-1).int(), number_B1QK.int()


def compiled(backend: Any = "inductor") -> Any:
    """For each length of rows, window and kind of pass once. Past torch's own limit of 8 it would write down
    the scores of whole rows, in silence; past ours it is an error."""
    return torch.compile(
        flex_attention, backend=backend, dynamic=False, fullgraph=True, recompile_limit=MAX_GRAPHS
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
