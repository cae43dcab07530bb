"""Forward passes of the policy over a step's packs, and over one sequence alone: logprobs of its tokens.

Neighbours: `update.py` and `old_logprobs.py` ask; `packing.py` lays the rows out. Knows no loss and no
version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.trainer import losses
from runtime.trainer.packing import Pack, Sequences

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy


def sequences(batch: Batch) -> Sequences:
    """The batch's sequences as packing wants them."""
    tokens, sampled = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.sampled)
    spans = [batch.span(sequence) for sequence in range(batch.sequences)]
    return Sequences(
        [tokens[span] for span in spans], [sampled[span] for span in spans], [span.start for span in spans]
    )


def pack_logprobs(policy: Policy, one: Pack, batch: Batch) -> losses.TokenLogprobs:
    """Of a pack's T sampled tokens, each at the temperature it was sampled with."""
    device = policy.device
    temperature_T = torch.from_numpy(batch.temperature)[one.sequence_T].to(device)
    hidden = policy.hidden(one.tokens_BL.to(device), one.positions_BL.to(device), one.mask_BLL().to(device))
    rows, places = one.row_T.to(device), one.place_T.to(device)
    return losses.token_logprobs(hidden[rows, places], policy.output, one.target_T.to(device), temperature_T)


def sequence_logprobs(policy: Policy, tokens: Tensor) -> Tensor:
    """Of every token of one sequence [P], at temperature 1; 0 at its first token. On the CPU."""
    size = len(tokens)
    ids = tokens[None].to(policy.device)
    places = torch.arange(size, device=policy.device)
    hidden = policy.hidden(
        ids, places[None], torch.ones(1, size, size, dtype=torch.bool, device=policy.device).tril()
    )
    ones = torch.ones(size - 1, device=policy.device)
    found = losses.token_logprobs(hidden[0, :-1], policy.output, ids[0, 1:], ones)
    return torch.cat([torch.zeros(1), found.logprob_T.cpu()])
