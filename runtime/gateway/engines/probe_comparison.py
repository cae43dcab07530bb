"""Compares an engine's logprobs with the trainer's, on the sequences of a checkpoint's logprob probe.

Neighbours: shared/probe_file.py has the file's format, trainer/probe_logprobs.py makes it; version_check.py
judges the errors. Knows nothing of adapters, and judges no error.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from runtime.engine.command import BASE_NAME
from runtime.gateway.engines.engine_client import EngineClient
from runtime.shared.probe_file import PROBE_TOKENS

Floats = NDArray[np.float64]

# The adapter's effect is measurable if rounding leaves its slope this certain (one standard error).
_SLOPE_ERROR = 0.1


class ProbeError(Exception):
    """The probe's file cannot be read, or has no sampled token or no finite logprob to compare with."""


@dataclass(frozen=True)
class Scores:
    """One engine's scores: of the counted tokens under the adapter and under the base [K], [K], and the
    error of each sequence's last token when the prefix cache is read."""

    served: Floats
    base: Floats
    cached: Floats


@dataclass(frozen=True)
class Errors:
    """One engine's errors in nats: the largest and the mean of |served - trainer's|, and the largest of
    |with prefix cache - without|. `effect_share`: the slope of the engine's adapter effect on the trainer's,
    1 if they agree; None if the effect is too small to measure."""

    largest: float
    mean: float
    cached: float
    effect_share: float | None


@dataclass(frozen=True)
class LogprobProbe:
    """Sequences of token ids, which of their tokens count, and the trainer's logprobs of those [K]."""

    sequences: list[list[int]]
    counts: NDArray[np.bool_]
    policy: Floats
    base: Floats

    @staticmethod
    def read(path: Path, context_length: int) -> LogprobProbe:
        """Sequences cut to the scored part. Raises ProbeError when there is nothing to compare."""
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ProbeError(f"no probe: {error}") from error
        offsets = arrays["offsets"].tolist()
        counts = arrays["sampled"].astype(bool)
        kept = [_cut(start, end, counts, context_length) for start, end in itertools.pairwise(offsets)]
        rows = np.concatenate([np.arange(part.start, part.stop) for part in kept])
        counts = counts[rows]
        if not counts.any():
            raise ProbeError("the probe has no sampled token")
        probe = LogprobProbe(
            sequences=[arrays["tokens"][part].tolist() for part in kept],
            counts=counts,
            policy=arrays["logprobs_policy"][rows][counts].astype(np.float64),
            base=arrays["logprobs_base"][rows][counts].astype(np.float64),
        )
        if not (np.isfinite(probe.policy).all() and np.isfinite(probe.base).all()):
            raise ProbeError("the trainer's own logprobs are not finite")
        return probe

    async def score(self, engine: EngineClient, name: str) -> Scores:
        """The engine's scores of the counted tokens, and of each sequence's last token through the prefix
        cache.

        The latter comes first, because scoring fills the prefix cache.
        """
        ends = [ids for ids in self.sequences if len(ids) > 1]
        continued = await asyncio.gather(*(engine.score_next(name, ids[:-1], ids[-1]) for ids in ends))
        requests = [(model, ids) for model in (name, BASE_NAME) for ids in self.sequences]
        scores = [np.array(row) for row in await asyncio.gather(*(engine.score(*one) for one in requests))]
        half = len(self.sequences)
        served, base = np.concatenate(scores[:half]), np.concatenate(scores[half:])
        last = np.array([row[-1] for row in scores[:half] if len(row) > 1])
        return Scores(served[self.counts], base[self.counts], np.array(continued) - last)

    @property
    def effect(self) -> float:
        """The adapter's largest change of a logprob, in nats, by the trainer."""
        return float(np.abs(self.policy - self.base).max())

    def errors(self, scores: Scores) -> Errors:
        """The errors of one engine's scores."""
        error = np.abs(scores.served - self.policy)
        trained = self.policy - self.base
        noise = 2 * np.square(scores.base - self.base).mean()  # of a difference of two logprobs
        share = None
        if noise < _SLOPE_ERROR**2 * (trained @ trained):
            share = float((scores.served - scores.base) @ trained / (trained @ trained))
        cached = float(np.abs(scores.cached).max(initial=0.0))
        return Errors(float(error.max()), float(error.mean()), cached, share)


def _cut(start: int, end: int, counts: NDArray[np.bool_], context_length: int) -> slice:
    """The part of one sequence that is scored. The engine wants room for one more token after it."""
    first = start + int(counts[start:end].argmax())
    return slice(start, min(end, first + PROBE_TOKENS, start + context_length - 1))
