"""Forward passes of the policy over a step's packs, and over one sequence alone: logprobs of its tokens.

Neighbours: `update.py` and `old_logprobs.py` ask; `packing.py` lays the rows out. Knows no loss and no
version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runtime.shared.batch import Batch
from runtime.shared.fixed_row_lengths import fixed_length
from runtime.trainer import losses
from runtime.trainer.attention import AttentionPattern, BlockSparseMask
from runtime.trainer.packing import PADDING, Pack, Sequences

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# Sequences alone are padded, on a GPU, to this many places, or to another length of
# `shared/fixed_row_lengths.py`.
_SINGLE_SEQUENCE_TOKENS = 4096


def sequences(batch: Batch) -> Sequences:
    """The batch's sequences as packing wants them."""
    tokens, sampled = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.sampled)
    spans = [batch.span(sequence) for sequence in range(batch.sequences)]
    return Sequences(
        [tokens[span] for span in spans], [sampled[span] for span in spans], [span.start for span in spans]
    )


def pack_logprobs(policy: Policy, one: Pack, batch: Batch) -> losses.TokenLogprobs:
    """The logprobs of a pack's T sampled tokens, each at the temperature it was sampled with.

    Where a grammar held an answer, among the tokens that it allowed. Raises BatchError.
    """
    device = policy.device
    allowed_TW = policy.grammar_masks.of_pack(one, batch) if batch.meta.get("grammars") else None
    temperature_T = torch.from_numpy(batch.temperature)[one.sequence_T].to(device)
    hidden = policy.hidden(
        one.tokens_BL.to(device), one.positions_BL.to(device), attention_pattern(one, device)
    )
    rows, places = one.row_T.to(device), one.place_T.to(device)
    return losses.token_logprobs(
        hidden[rows, places],
        policy.output,
        one.target_T.to(device),
        temperature_T,
        None if allowed_TW is None else allowed_TW.to(device),
    )


def attention_pattern(one: Pack, device: torch.device) -> Tensor | AttentionPattern:
    """The attention pattern of a pack, in the form that the device's attention takes."""
    if device.type != "cuda":
        return one.mask_BLL().to(device)
    return BlockSparseMask(one.tree_BL.to(device), one.branch_BL.to(device), one.positions_BL.to(device))


def sequence_logprobs(policy: Policy, tokens: Tensor) -> Tensor:
    """The logprob of every token of one sequence [P], at temperature 1; 0 at its first token. On the CPU."""
    size = len(tokens)
    ids = tokens.to(policy.device)
    hidden_LD = _sequence_hidden(policy, ids)
    ones = torch.ones(size - 1, device=policy.device)
    found = losses.token_logprobs(hidden_LD[: size - 1], policy.output, ids[1:], ones)
    return torch.cat([torch.zeros(1), found.logprob_T.cpu()])


def next_logits(policy: Policy, tokens: Tensor) -> Tensor:
    """The logits [V] of the token after one sequence [P], on the policy's device."""
    hidden_LD = _sequence_hidden(policy, tokens.to(policy.device))
    return policy.output(hidden_LD[len(tokens) - 1 : len(tokens)])[0]


def _sequence_hidden(policy: Policy, ids: Tensor) -> Tensor:
    """Hidden states [L, D] of one sequence; on a GPU padded to one of few lengths, as packs are."""
    size, device = len(ids), policy.device
    if device.type != "cuda":
        mask = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        return policy.hidden(ids[None], torch.arange(size, device=device)[None], mask)[0]
    length = fixed_length(size, _SINGLE_SEQUENCE_TOKENS)
    tokens_L = nn.functional.pad(ids, (0, length - size))
    tree_L = torch.full((length,), PADDING, device=device)
    tree_L[:size] = 0
    places_L = torch.arange(length, device=device)
    blocks = BlockSparseMask(tree_L[None], torch.zeros_like(tree_L)[None], places_L[None])
    return policy.hidden(tokens_L[None], places_L[None], blocks)[0]
