"""Computes a checkpoint's logprob probe: the trainer's logprobs of some of the batch's sequences, or of a
greedy one where there is no batch.

Neighbours: the recipe commits it with each checkpoint; shared/probe_file.py has the format; the gateway
verifies with it that engines hold the committed adapter. Knows nothing of a tokenizer, nor of engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.shared.batch import SCHEMA, Batch
from runtime.shared.probe_file import PROBE_TOKENS
from runtime.trainer.forward import next_logits, sequence_logprobs

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# The first ids of a vocabulary: in those of the models we train, characters in their order.
_PROMPT = tuple(range(3, 11))
_TOKENS = 64


@torch.no_grad()
def compute_probe_logprobs(policy: Policy, batch: Batch, count: int = 2) -> dict[str, Tensor]:
    """The batch's longest sampled sequences, up to the compared length, with the logprob of each token: fp32,
    0 at a first token."""
    # The longest sampled sequences test the most; ties go to the first.
    order = sorted(
        range(batch.sequences), key=lambda sequence: -int(batch.sampled[batch.span(sequence)].sum())
    )
    spans = [_compared_span(batch, sequence) for sequence in order[:count]]
    tokens = [torch.from_numpy(batch.tokens[span]).long() for span in spans]
    with_adapter = [sequence_logprobs(policy, ids) for ids in tokens]
    with policy.reference():
        without = [sequence_logprobs(policy, ids) for ids in tokens]
    lengths = [0, *(len(ids) for ids in tokens)]
    return {
        "tokens": torch.cat(tokens),
        "sampled": torch.cat([torch.from_numpy(batch.sampled[span]) for span in spans]),
        "offsets": torch.tensor(lengths).cumsum(0),
        "logprobs_policy": torch.cat(with_adapter),
        "logprobs_base": torch.cat(without),
    }


def _compared_span(batch: Batch, sequence: int) -> slice:
    """A sequence up to the last token that an engine is asked about."""
    span = batch.span(sequence)
    first = span.start + int(batch.sampled[span].argmax())
    return slice(span.start, min(span.stop, first + PROBE_TOKENS))


@torch.no_grad()
def fallback_probe_batch(policy: Policy, tokens: int = _TOKENS) -> Batch:
    """For a probe where nothing has been sampled yet: a fixed prompt, and so many most likely tokens."""
    ids = torch.tensor(_PROMPT)
    for _ in range(tokens):
        ids = torch.cat([ids, next_logits(policy, ids).argmax(-1, keepdim=True).cpu()])
    sequence = ids.numpy().astype(np.int32)
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
