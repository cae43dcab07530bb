"""Checks that a model computes a packed row as it does its sequences alone (C41): once, at its parity check.

Engines see one sequence at a time, so no comparison with them covers packing. A model that counts positions
by itself, or looks past its mask, is right alone and wrong in a row. Neighbours: parity_export.py asks,
`packing.py` lays the row out. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.shared.architectures import PolicyError
from runtime.trainer import losses
from runtime.trainer.forward import attention_pattern, sequence_logprobs
from runtime.trainer.packing import Pack, Sequences, pack

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# The largest difference of a logprob in fp32. In bf16 the median: one token in many may go to another expert.
MAX_ERROR_FP32 = 1e-3
MEDIAN_ERROR_BF16 = 0.1


@torch.no_grad()
def check_packing(policy: Policy, sequences: Sequence[Tensor], count: int) -> None:
    """Raise PolicyError unless a row of trees has the logprobs of its sequences alone.

    `sequences`: ids whose last `count` are answers. The first one's prompt gets a second branch.
    """
    branch = torch.cat([sequences[0][:-count], sequences[0][-count:].flip(0)])
    rows = [ids.cpu() for ids in (sequences[0], branch, *sequences[1:])]
    lengths = [len(ids) for ids in rows]
    offsets = [sum(lengths[:place]) for place in range(len(rows))]
    sampled = [torch.arange(len(ids)) >= len(ids) - count for ids in rows]
    alone_N = torch.cat([sequence_logprobs(policy, ids) for ids in rows])
    packs = pack(
        Sequences(rows, sampled, offsets),
        range(len(rows)),
        sum(lengths),
        fixed_rows=policy.device.type == "cuda",
        one_sequence_per_row=policy.one_sequence_per_row,
    )
    error_T = torch.cat([(_logprobs(policy, one) - alone_N[one.source_T]).abs() for one in packs])
    exact = next(policy.model.parameters()).dtype == torch.float32
    error, most = (error_T.max(), MAX_ERROR_FP32) if exact else (error_T.median(), MEDIAN_ERROR_BF16)
    if not error <= most:
        raise PolicyError(
            "a packed row is not computed as its sequences are alone: logprobs differ by "
            f"{float(error):.2g} (at most {most:g})"
        )


def _logprobs(policy: Policy, one: Pack) -> Tensor:
    """The logprobs of a pack's sampled tokens [T], on the CPU."""
    device = policy.device
    hidden = policy.hidden(
        one.tokens_BL.to(device), one.positions_BL.to(device), attention_pattern(one, device)
    )
    predicting = hidden[one.row_T.to(device), one.place_T.to(device)]
    target_T = one.target_T.to(device)
    ones = torch.ones(len(target_T), device=device)
    return losses.token_logprobs(predicting, policy.output, target_T, ones).logprob_T.cpu()
