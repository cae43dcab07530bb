"""The batch of a supervised step: examples' ids written sequence by sequence, their answers marked.

Neighbours: examples.py has the ids, handover.py gives the batch to the trainer, shared/batch.py is its form
on disk and defines the values for unsampled tokens and missing rewards. Tokenises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.gateway.steps.examples import TokenisedExample
from runtime.shared.batch import Batch


def build_sft_batch(examples: Sequence[TokenisedExample], meta: dict[str, Any]) -> Batch:
    """The batch of these examples, one at least. `meta` is added to the batch's JSON."""
    tokens = [np.asarray(one.tokens, np.int32) for one in examples]
    learnt = [np.zeros(len(ids), np.uint8) for ids in tokens]
    for one, marks in zip(examples, learnt, strict=True):
        for start, end in one.answers:
            marks[start:end] = 1
    example_ids = sorted({one.example for one in examples})
    member = {example: index for index, example in enumerate(example_ids)}
    count, size = len(examples), sum(map(len, tokens))
    return Batch(
        tokens=np.concatenate(tokens),
        sampled=np.concatenate(learnt),
        logprobs=np.zeros(size, np.float32),
        offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        temperature=np.ones(count, np.float32),
        version=np.full(count, -1, np.int64),
        truncated=np.zeros(count, np.uint8),
        member=np.asarray([member[one.example] for one in examples], np.int64),
        reward=np.zeros(len(example_ids), np.float32),
        group=np.zeros(len(example_ids), np.int64),
        meta=meta
        | {
            "groups": [{"id": "examples", "predictor": None}],
            "members": [{"example": example, "group": 0} for example in example_ids],
            "samples": [_described(one) for one in examples],
        },
    )


def _described(one: TokenisedExample) -> dict[str, Any]:
    return {"example": one.example, "turns": [{"start": start, "end": end} for start, end in one.answers]}
