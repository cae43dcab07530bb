"""One optimizer step on examples: cross-entropy of their answers' tokens, and its metrics (C53).

Neighbours: the recipe calls it for a "supervised" batch; update.py has the common part of every step,
losses.py the loss. Knows nothing of rewards or tokenizing.

Names carry dimensions: A answers, T learned tokens of a pack.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.shared import failpoints
from runtime.shared.batch import Batch
from runtime.shared.learnable import answers
from runtime.shared.step_settings import UpdateSettings
from runtime.trainer import losses
from runtime.trainer.forward import pack_logprobs
from runtime.trainer.packing import Pack
from runtime.trainer.ranks import Ranks
from runtime.trainer.update import StepResult, all_reduce_gradients, local_packs, optimizer_step

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# Sums over the step's learned tokens, the loss with its weights.
_SUMMED = ("loss", "logprob", "entropy", "kl_reference")


def sft_step(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, settings: UpdateSettings, ranks: Ranks
) -> StepResult:
    """One step: every sequence of the batch is learned from. Raises RanksDifferError."""
    began = time.monotonic()
    policy.zero_grad()  # of a step that failed half way (C49)
    metrics = {
        "updated": 1.0,
        "trained_tokens": float(batch.sampled.sum()),
        "learning_rate": float(optimizer.param_groups[0]["lr"]),
        **sft_gradients(policy, batch, settings, ranks),
    }
    metrics["grad_norm"] = optimizer_step(policy, optimizer, settings, ranks)
    metrics["train_seconds"] = time.monotonic() - began
    return StepResult(metrics, _counts(batch), settings.recorded)


def sft_gradients(policy: Policy, batch: Batch, settings: UpdateSettings, ranks: Ranks) -> dict[str, float]:
    """Fill the masters' gradients with the loss's, and return the metrics over the step's tokens.

    A token's weight is settled for the whole step: packs and ranks change nothing but rounding.
    """
    length_A = torch.from_numpy(answers(batch)[1])
    weight_A = losses.token_weights(length_A, settings.normaliser)
    sums = torch.zeros(len(_SUMMED), device=policy.device, dtype=torch.float64)
    for one in local_packs(policy, batch, list(range(batch.sequences)), settings, ranks):
        loss, measured = _pack_loss(policy, batch, one, weight_A, settings)
        loss.backward()
        failpoints.failpoint("trainer.pack")
        policy.collect_gradients()
        sums += measured
    all_reduce_gradients(policy, sums, ranks)
    loss, *means = (sums / torch.tensor([1.0, *[float(length_A.sum())] * 3], device=sums.device)).tolist()
    logprob, entropy, kl_reference = means
    return {
        "loss": loss,
        "perplexity": math.exp(min(-logprob, 80.0)),
        "entropy": entropy,
        "kl_reference": kl_reference,
    }


def _pack_loss(
    policy: Policy, batch: Batch, one: Pack, weight_A: Tensor, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """A pack's loss, and its part of the step's sums."""
    found = pack_logprobs(policy, one, batch)
    reference_T = None
    if settings.kl_beta > 0:
        with torch.no_grad(), policy.reference():
            reference_T = pack_logprobs(policy, one, batch).logprob_T
    weight_T = weight_A[torch.from_numpy(batch.answers)[one.source_T]].to(policy.device)
    loss, kl = losses.sft_loss(found.logprob_T, weight_T, reference_T, settings.kl_beta)
    parts = (loss, found.logprob_T.sum(), found.entropy_T.sum(), kl)
    return loss, torch.stack([part.detach().double() for part in parts])


def _counts(batch: Batch) -> dict[str, Any]:
    """The gateway's counts, which had decided everything; for a batch without them, counts of its own
    content."""
    own = {"trained": int(batch.turns.sum()), "learned_tokens": int(batch.sampled.sum())}
    return {"samples": own["trained"], **(batch.meta.get("counts") or {}), **own}
