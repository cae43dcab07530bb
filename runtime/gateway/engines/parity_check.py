"""Judges whether engine and trainer compute the same model, by the numbers of a parity check (C58).

Neighbours: trainer/parity_export.py made the files, version_check.py had every engine score it, and
versions/model_check.py asks for this before the first rollout. Pure: knows nothing of engines or files.

The checks, of the base and under a random adapter with an effect:

- fp32: no logprob differs by more than a publication's bound. Both sides compute the same sums.
- bf16: a publication's mean. Both round in different places.
- Both: two shares that do not depend on how sharp the model is. A wrong model whose logprobs are flat is off
  by less than that mean on every token, but by as much as they vary at all.
- The adapter's effect, token by token. A correct base alone does not prove that no projections were mixed up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runtime.gateway.engines.probe_comparison import Floats
from runtime.gateway.engines.version_check import (
    MAX_ERROR_CACHED,
    MAX_ERROR_FP32,
    MEAN_ERROR_BF16,
    Measured,
    VerificationError,
)

# The mean error, as a share of how far the trainer's logprobs of the base vary among themselves. Measured
# with random Qwen3s in bf16: 0.01 (4 flat layers) to 0.03 (12 sharp ones); flat with another rotation 0.17,
# with other norms 0.14.
MAX_SPREAD_SHARE = 0.1
# How far the engines' effect of the adapter is off on average, as a share of the trainer's: 0.02 to 0.1
# there, and 1 where an engine leaves the adapter out.
MAX_EFFECT_ERROR = 0.3
# An adapter that moves logprobs by a smaller share of their spread proves nothing of adapters.
MIN_EFFECT = 0.05


@dataclass(frozen=True)
class LogprobError:
    """Served against trained logprobs: the mean and the largest difference, and MAX_SPREAD_SHARE's share."""

    mean: float
    largest: float
    share: float


@dataclass(frozen=True)
class ParityReport:
    """The measurements, each the worst of all engines. `spread`: the deviation of the base's logprobs;
    `effect`: how far the adapter moves them on average; `effect_error`: see MAX_EFFECT_ERROR."""

    engines: int
    modules: int
    probe_tokens: int
    base: LogprobError
    adapter: LogprobError
    cached_error: float
    spread: float
    effect: float
    effect_error: float
    stage_seconds: float
    verify_seconds: float
    probe_seconds: float


class ParityError(VerificationError):
    """Engine and trainer do not compute the same; `proof` has the numbers."""

    def __init__(self, message: str, proof: ParityReport) -> None:
        super().__init__(message)
        self.proof = proof


def judge(found: Measured, dtype: str) -> ParityReport:
    """The report. Raises ParityError, with the difference and its bound."""
    proof = _report(found)
    if not proof.effect >= MIN_EFFECT * proof.spread:
        raise ParityError("the test adapter changes no logprob, so it proves nothing about adapters", proof)
    why = _disagreement(proof, dtype)
    if why is not None:
        raise ParityError(f"engine and trainer disagree on this model: {why}", proof)
    if not proof.cached_error <= MAX_ERROR_CACHED[dtype]:
        raise ParityError(f"a logprob is {proof.cached_error:.2g} off when the prefix cache is read", proof)
    return proof


def _report(found: Measured) -> ParityReport:
    trained, base = found.probe.policy, found.probe.base
    spread, effect = float(base.std()), _size(trained - base)
    stage_seconds, verify_seconds, probe_seconds = found.seconds
    effects = [_size((one.served - one.base) - (trained - base)) for one in found.scores]
    return ParityReport(
        engines=len(found.engines),
        modules=found.report.modules,
        probe_tokens=len(base),
        base=_logprob_error([one.base - base for one in found.scores], spread),
        adapter=_logprob_error([one.served - trained for one in found.scores], spread),
        cached_error=_worst(float(np.abs(one.cached).max(initial=0.0)) for one in found.scores),
        spread=spread,
        effect=effect,
        effect_error=_share(_worst(effects), effect),
        stage_seconds=stage_seconds,
        verify_seconds=verify_seconds,
        probe_seconds=probe_seconds,
    )


def _disagreement(proof: ParityReport, dtype: str) -> str | None:
    """How the two differ by more than they may, in words; None if they agree. Nan agrees with nothing."""
    both = (proof.adapter, proof.base)
    if dtype == "float32" and not all(one.largest <= MAX_ERROR_FP32 for one in both):
        return (
            f"logprobs differ by up to {proof.adapter.largest:.2g} under a random adapter "
            f"(at most {MAX_ERROR_FP32:g}), {proof.base.largest:.2g} under the base"
        )
    if not all(one.mean <= MEAN_ERROR_BF16 for one in both):
        return (
            f"logprobs differ by {proof.adapter.mean:.2g} on average under a random adapter "
            f"(at most {MEAN_ERROR_BF16:g}), {proof.base.mean:.2g} under the base"
        )
    if not all(one.share <= MAX_SPREAD_SHARE for one in both):
        return (
            f"logprobs differ by {proof.adapter.share:.2g} of their spread under a random adapter "
            f"(at most {MAX_SPREAD_SHARE:g}), {proof.base.share:.2g} under the base"
        )
    if not proof.effect_error <= MAX_EFFECT_ERROR:
        return (
            f"what a random adapter does to logprobs differs by {proof.effect_error:.2g} of it "
            f"(at most {MAX_EFFECT_ERROR:g})"
        )
    return None


def _logprob_error(errors: list[Floats], spread: float) -> LogprobError:
    return LogprobError(
        mean=_worst(_size(error) for error in errors),
        largest=_worst(float(np.abs(error).max()) for error in errors),
        share=_share(_worst(_size(error) for error in errors), spread),
    )


def _worst(numbers: Iterable[float]) -> float:
    """The worst of all engines; nan if any is."""
    return float(np.max([*numbers]))


def _size(values: Floats) -> float:
    return float(np.abs(values).mean())


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("inf")
