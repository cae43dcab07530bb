"""A sequence for a proof, where nothing has been sampled yet: what the policy itself goes on with.

Neighbours: the recipe proves with it the adapter that a run begins with; `update.probe` makes the proof.
Knows nothing of a tokenizer: likely tokens are what matters, not what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.shared.batch import SCHEMA, Batch

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# The first ids of a vocabulary: in those of the models we train, characters in their order.
_PROMPT = tuple(range(3, 11))
_TOKENS = 64


@torch.no_grad()
def spoken(policy: Policy, tokens: int = _TOKENS) -> Batch:
    """One sequence: a fixed prompt and so many most likely tokens, the same in every process."""
    ids = torch.tensor([_PROMPT], device=policy.device)
    for _ in range(tokens):
        size = ids.shape[1]
        places = torch.arange(size, device=policy.device)
        mask = torch.ones(1, size, size, dtype=torch.bool, device=policy.device).tril()
        hidden = policy.hidden(ids, places[None], mask)
        ids = torch.cat([ids, policy.output(hidden[0, -1:]).argmax(-1)[None]], dim=1)
    sequence = ids[0].cpu().numpy().astype(np.int32)
    return Batch(
        tokens=sequence,
        sampled=np.asarray([0] * len(_PROMPT) + [1] * tokens, np.uint8),
        logprobs=np.zeros(len(sequence), np.float32),
        offsets=np.asarray([0, len(sequence)], np.int64),
        temperature=np.ones(1, np.float32),
        version=np.zeros(1, np.int64),
        truncated=np.zeros(1, np.uint8),
        member=np.zeros(1, np.int64),
        reward=np.zeros(1, np.float32),
        group=np.zeros(1, np.int64),
        meta={"schema": SCHEMA, "kind": "train", "step": 1},
    )
