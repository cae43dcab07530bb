"""One optimizer step on one batch: advantages, packs, gradients over all ranks, AdamW, and its metrics.

Neighbours: the recipe calls it; `forward.py`, `old_logprobs.py`, `losses.py` and `packing.py` do the
arithmetic. Imports neither torchtune nor vLLM: the policy is any object with `hidden`, `output`,
`master_weights`, `reference`.

Names carry dimensions: M members, S sequences, A answers, N tokens of the step, T sampled tokens of a pack, G
lags, F figures of each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.shared import failpoints
from runtime.shared.batch import Batch
from runtime.shared.learnable import Usable, answers, learnable
from runtime.shared.rewards import reward_metrics
from runtime.shared.step_settings import UpdateSettings
from runtime.trainer import losses
from runtime.trainer.behavior_logprobs import BehaviorLogprobReuse
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.old_logprobs import OldLogprobs, PolicyHistory, old_logprobs
from runtime.trainer.packing import Pack, pack
from runtime.trainer.ranks import Ranks
from runtime.trainer.staleness import METRIC_COUNT, StalenessBuckets

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

# Metrics of a step, over all ranks, besides those by lag: sums; below them means over the step's tokens.
_SUMMED_METRICS = ("loss", "unkept_tokens", "trusted_tokens")
_MEAN_METRICS = ("kl_reference", "entropy")


@dataclass(frozen=True)
class StepResult:
    """A step's metrics and settings, and the counts of its samples beyond the gateway's."""

    metrics: dict[str, float]
    counts: dict[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def added_to_counters(self, before: Mapping[str, int], empty: Mapping[str, int]) -> dict[str, int]:
        """The run's sums with one step more, and with the `empty` steps before it."""
        step = {"steps": 1, "updates": int(self.metrics["updated"])}
        step |= {name: int(self.counts.get(name, 0)) for name in ("samples", "trained", "sampled_tokens")}
        step |= {f"empty_{name}": empty.get(name, 0) for name in ("steps", "samples")}
        return {name: before.get(name, 0) + value for name, value in step.items()}


@dataclass(frozen=True)
class Selected:
    """What is trained of a batch, with the advantage of each sequence [S].

    `weight_A`: the weight of a sampled token of each answer in the step's loss, by the normaliser; 0 if it is
    not trained. Turns joined in one sequence are an answer each, so that joining changes no loss. `tokens`:
    the number of sampled tokens in the trained sequences.
    """

    learnable: Usable
    tokens: int
    weight_A: Tensor
    advantage_S: Tensor

    @property
    def sequences(self) -> list[int]:
        return self.learnable.sequences


def select(batch: Batch, settings: UpdateSettings) -> Selected:
    """The batch's sequences with something to learn from (`learnable.py`), their advantages and weights."""
    found = learnable(batch, settings)
    row_A, length_A = map(torch.from_numpy, answers(batch))
    advantage_M = losses.advantages(
        torch.from_numpy(found.reward_M), torch.from_numpy(batch.group), scale=settings.scale_rewards
    )
    weight_A = torch.zeros(len(row_A))
    trained_A = torch.isin(row_A, torch.tensor(found.sequences))
    if found.sequences:
        weight_A[trained_A] = losses.token_weights(
            length_A[trained_A], settings.normaliser, settings.constant_tokens
        )
    return Selected(
        found,
        tokens=int(length_A[trained_A].sum()),
        weight_A=weight_A,
        advantage_S=advantage_M[torch.from_numpy(batch.member)],
    )


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    settings: UpdateSettings,
    ranks: Ranks,
    history: PolicyHistory | None = None,
) -> StepResult:
    """One step. With nothing to learn from, the optimizer is not touched and `updated` is 0.

    `history`: the earlier versions; without it, everything counts as sampled by the policy as it is. Raises
    RanksDifferError.
    """
    began = time.monotonic()
    selected = select(batch, settings)
    metrics = {
        "updated": float(bool(selected.sequences)),
        "trained_tokens": float(selected.tokens),
        "learning_rate": float(optimizer.param_groups[0]["lr"]),
        **reward_metrics(batch),
    }
    if settings.overlong == "soft":
        metrics["overlong_penalty"] = float(torch.from_numpy(selected.learnable.penalty_M).mean())
    if selected.sequences:
        policy.zero_grad()  # of a step that failed half way (C49)
        metrics |= gradients(policy, batch, selected, settings, ranks, history)
        metrics["grad_norm"] = optimizer_step(policy, optimizer, settings, ranks)
    metrics["train_seconds"] = time.monotonic() - began
    counts = batch.meta.get("counts") or {"samples": batch.sequences}
    return StepResult(metrics, selected.learnable.counted(counts, batch, selected.tokens), settings.recorded)


def optimizer_step(
    policy: Policy, optimizer: torch.optim.Optimizer, settings: UpdateSettings, ranks: Ranks
) -> float:
    """Clip the gradients and step on them; the norm they had. Raises RanksDifferError."""
    master_weights = list(policy.master_weights.values())
    norm = torch.nn.utils.clip_grad_norm_(master_weights, settings.max_grad_norm, error_if_nonfinite=True)
    optimizer.step()
    policy.zero_grad()
    policy.refresh_working_copy()
    ranks.check_equal(master_weights)
    return float(norm)


def gradients(
    policy: Policy,
    batch: Batch,
    selected: Selected,
    settings: UpdateSettings,
    ranks: Ranks,
    history: PolicyHistory | None = None,
    old: OldLogprobs | None = None,
) -> dict[str, float]:
    """Fill the master weights' gradients with the loss's, and return the metrics over the step's tokens.

    Every rank packs the same sequences the same way and takes every size-th pack. A token's weight was
    settled for the whole step, so ranks, packs and their order change nothing but rounding. `old` is computed
    from `history` unless given.
    """
    packs = local_packs(policy, batch, selected.sequences, settings, ranks)
    pack_sequences = partial(stage, policy, batch, settings)
    if old is None:
        reuse = (
            None if history is None else BehaviorLogprobReuse.of(policy, settings, selected.sequences, ranks)
        )
        old = old_logprobs(policy, batch, packs, history, pack_sequences, reuse)
    buckets = StalenessBuckets.of(batch, selected.sequences)
    whole = len(_SUMMED_METRICS + _MEAN_METRICS)
    sums = torch.zeros(whole + METRIC_COUNT * len(buckets.values), device=policy.device, dtype=torch.float64)
    ratio_max = torch.zeros(len(buckets.values), device=policy.device)
    for one in packs:
        terms, entropy = _pack_loss(policy, batch, one, selected, settings, old, buckets)
        terms.loss.backward()
        failpoints.failpoint("trainer.pack")
        policy.collect_gradients()
        sums += _pack_sums(terms, entropy)
        ratio_max = torch.maximum(ratio_max, terms.ratio_max.detach().float())
    sums[_SUMMED_METRICS.index("unkept_tokens")] += old.fallback_tokens
    sums[_SUMMED_METRICS.index("trusted_tokens")] += old.reused_tokens
    all_reduce_gradients(policy, sums, ranks)
    ranks.all_reduce_max(ratio_max)
    sums[len(_SUMMED_METRICS) : whole] /= selected.tokens
    found = dict(zip(_SUMMED_METRICS + _MEAN_METRICS, sums[:whole].tolist(), strict=True))
    return found | buckets.metrics(sums[whole:].view(METRIC_COUNT, -1).cpu(), ratio_max.cpu())


def local_packs(
    policy: Policy, batch: Batch, chosen: list[int], settings: UpdateSettings, ranks: Ranks
) -> list[Pack]:
    """This rank's packs of the chosen sequences."""
    return stage(policy, batch, settings, chosen)[ranks.rank :: ranks.size]


def stage(policy: Policy, batch: Batch, settings: UpdateSettings, chosen: list[int]) -> list[Pack]:
    """The chosen sequences in packs."""
    fixed_rows = policy.device.type == "cuda"
    return pack(
        sequences(batch),
        chosen,
        settings.pack_tokens,
        fixed_rows=fixed_rows,
        one_sequence_per_row=policy.one_sequence_per_row,
    )


def all_reduce_gradients(policy: Policy, sums: Tensor, ranks: Ranks) -> None:
    """Sums and gradients over all ranks, in place."""
    for master in policy.master_weights.values():
        if master.grad is None:  # this rank had no pack
            master.grad = torch.zeros_like(master)
    ranks.all_reduce_sum(
        [sums, *(master.grad for master in policy.master_weights.values() if master.grad is not None)]
    )


def _pack_sums(terms: losses.LossTerms, entropy: Tensor) -> Tensor:
    """One pack's part of the step's sums, in their order: of the whole step, then of each figure by lag."""
    none = torch.zeros_like(terms.loss)
    whole = (terms.loss, none, none, terms.kl_reference, entropy)
    counted = (terms.masked, terms.masked_answers, terms.truncated)
    averaged = (terms.ratio, terms.clipped, terms.kl_behaviour)
    return torch.cat([value.detach().double().reshape(-1) for value in (*whole, *counted, *averaged)])


def _pack_loss(
    policy: Policy,
    batch: Batch,
    one: Pack,
    selected: Selected,
    settings: UpdateSettings,
    old: OldLogprobs,
    buckets: StalenessBuckets,
) -> tuple[losses.LossTerms, Tensor]:
    device = policy.device
    behaviour_N = torch.from_numpy(batch.logprobs)
    answer_T = torch.from_numpy(batch.answers)[one.source_T]
    found = pack_logprobs(policy, one, batch)
    reference_T = None
    if settings.kl_beta > 0:
        with torch.no_grad(), policy.reference():
            reference_T = pack_logprobs(policy, one, batch).logprob_T
    terms = losses.policy_loss(
        found.logprob_T,
        behaviour_N[one.source_T].to(device),
        selected.advantage_S[one.sequence_T].to(device),
        selected.weight_A[answer_T].to(device),
        answer_T.to(device),
        loss=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        mismatch_cap=settings.mismatch_cap,
        old_T=old.of_pack(one, found.logprob_T.detach()),
        reference_T=reference_T,
        kl_beta=settings.kl_beta,
        lag_T=buckets.place_N[one.source_T].to(device),
        buckets=len(buckets.values),
    )
    return terms, found.entropy_T.sum()
