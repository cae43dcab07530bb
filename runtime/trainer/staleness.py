"""A step's metrics by staleness, the number of steps that were committed since a token was sampled.

Neighbours: `losses.py` adds up over a pack's tokens of each lag, `update.py` over packs and ranks, and the
batch knows the lags. The whole step's figures are sums of the lags'. Knows no loss.

Names carry dimensions: G lags of a step, F figures, N tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from runtime.shared.batch import Batch

# Sums; below them, metrics shown as a mean over the tokens, in the order in which `update.py` adds them up.
SUMMED_METRICS = ("masked_tokens", "masked_sequences", "mismatch_truncated")
MEAN_METRICS = ("ratio_mean", "clip_fraction", "kl_behaviour")
METRIC_COUNT = len(SUMMED_METRICS + MEAN_METRICS)


@dataclass(frozen=True)
class StalenessBuckets:
    """The lags in a step's trained tokens, youngest first, with the number of tokens and answers of each [G].

    `place_N`: the lag's index for each token of the step's sequences. Turns joined in one sequence have each
    its own.
    """

    values: list[int]
    tokens_G: Tensor
    answers_G: Tensor
    place_N: Tensor

    @classmethod
    def of(cls, batch: Batch, chosen: list[int]) -> Self:
        """The buckets of the chosen sequences."""
        lag_N, answer_N = torch.from_numpy(batch.staleness), torch.from_numpy(batch.answers)
        trained_N = torch.zeros(len(lag_N), dtype=torch.bool)
        for sequence in chosen:
            trained_N[batch.span(sequence)] = True
        trained_N &= answer_N >= 0
        values = lag_N[trained_N].unique()
        place_N = torch.searchsorted(values, lag_N)
        count = len(values)
        pairs = (answer_N * count + place_N)[trained_N].unique()
        tokens_G = place_N[trained_N].bincount(minlength=count)
        return cls(values.tolist(), tokens_G, (pairs % count).bincount(minlength=count), place_N)

    def metrics(self, sums_FG: Tensor, largest_G: Tensor) -> dict[str, float]:
        """The step's, and each lag's as `lag2/clip_fraction`, unless nothing is older than the policy.

        `sums_FG`: in the order of COUNTED and AVERAGED; `largest_G`: the largest ratio.
        """
        found = _metrics(sums_FG.sum(1), largest_G.max(), int(self.tokens_G.sum()))
        if self.values == [0]:
            return found
        for place, lag in enumerate(self.values):
            tokens, answers = int(self.tokens_G[place]), int(self.answers_G[place])
            own = {"trained_tokens": float(tokens), "trained_sequences": float(answers)}
            own |= _metrics(sums_FG[:, place], largest_G[place], tokens)
            found |= {f"lag{lag}/{name}": value for name, value in own.items()}
        return found


def _metrics(sums_F: Tensor, largest: Tensor, tokens: int) -> dict[str, float]:
    counted, means = sums_F[: len(SUMMED_METRICS)].tolist(), (sums_F[len(SUMMED_METRICS) :] / tokens).tolist()
    return dict(zip(SUMMED_METRICS + MEAN_METRICS, counted + means, strict=True)) | {
        "ratio_max": float(largest)
    }
