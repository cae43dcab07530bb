"""GRPO as pure tensors: advantages within a group, the clipped surrogate, its diagnostics.

Neighbours: `update.py` feeds it, `packing.py` lays the samples out. Knows no torchtune, vLLM or files.

Names carry dimensions: M members, S samples, T sampled tokens (of a micro-batch), V vocabulary, D width.
Source: DeepSeekMath (arXiv 2402.03300) eq. 3; asymmetric clip and token normaliser from DAPO
(arXiv 2503.14476); no division by the group's deviation from Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_EPSILON = 1e-6
# Far beyond any clip; past e^88 a ratio would be infinite and its gradient NaN even where it is clipped.
_MOST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Advantages:
    """`value_M` (0 where nothing is to learn), whether a member was scored, groups without variance."""

    value_M: Tensor
    scored_M: Tensor
    flat_groups: int
    flat_M: Tensor


def advantages(reward_M: Tensor, group_M: Tensor, *, scale: bool = False) -> Advantages:
    """Reward minus the mean of its group, over members with a finite reward; optionally over its deviation.

    A group whose rewards are all equal, or that has fewer than two scored members, has advantage exactly 0:
    rounding in a mean must not become a gradient. Members without a finite reward leave the mean.
    """
    reward_M = reward_M.double()
    scored_M = torch.isfinite(reward_M)
    value_M = torch.zeros_like(reward_M)
    flat_M = torch.zeros_like(scored_M)
    flat_groups = 0
    for group in group_M.unique().tolist():
        members = (group_M == group) & scored_M
        rewards = reward_M[members]
        if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
            flat_groups += 1
            flat_M |= members
            continue
        centred = rewards - rewards.mean()
        value_M[members] = centred / (rewards.std(correction=0) + _EPSILON) if scale else centred
    return Advantages(value_M.float(), scored_M, flat_groups, flat_M)


@dataclass(frozen=True)
class TokenLogprobs:
    """Per sampled token: its logprob at the sampling temperature, and the entropy there (no gradient)."""

    logprob_T: Tensor
    entropy_T: Tensor


def token_logprobs(
    hidden_TD: Tensor,
    output: Callable[[Tensor], Tensor],
    target_T: Tensor,
    temperature_T: Tensor,
    *,
    chunk: int = 1024,
) -> TokenLogprobs:
    """Logprobs of `target_T` in fp32, logits divided by the temperature *before* the log-softmax.

    `output` maps hidden states to logits. Chunks bound the memory to chunk x V; with more than one, logits
    are recomputed in the backward pass rather than kept.
    """
    pieces = []
    for start in range(0, len(target_T), chunk):
        part = slice(start, start + chunk)
        arguments = (hidden_TD[part], output, target_T[part], temperature_T[part])
        if len(target_T) > chunk and hidden_TD.requires_grad:
            pieces.append(checkpoint(_logprob_chunk, *arguments, use_reentrant=False))
        else:
            pieces.append(_logprob_chunk(*arguments))
    return TokenLogprobs(torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces]))


def _logprob_chunk(
    hidden_TD: Tensor, output: Callable[[Tensor], Tensor], target_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor]:
    logits_TV = output(hidden_TD).float() / temperature_T[:, None]
    all_TV = logits_TV.log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(all_TV.exp() * all_TV).sum(-1)
    return all_TV.gather(1, target_T[:, None])[:, 0], entropy_T


@dataclass(frozen=True)
class LossTerms:
    """Sums over T sampled tokens; dividing by the step's token count is the caller's, once for all ranks."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl_behaviour: Tensor
    kl_reference: Tensor


def clipped_surrogate(
    logprob_T: Tensor,
    behaviour_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_T: Tensor | None = None,
    kl_beta: float = 0.0,
) -> LossTerms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - behaviour), summed over tokens.

    The behaviour logprobs are the engine's own and carry no gradient. For A > 0 the upper clip stops the
    gradient, for A < 0 the lower one. `kl_beta` adds beta x k3 to the reference (adapter off) policy.
    """
    log_ratio_T = (logprob_T - behaviour_T.detach()).clamp(max=_MOST_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    kl_reference = logprob_T.new_zeros(())
    if reference_T is not None:
        towards_T = (reference_T.detach() - logprob_T).clamp(max=_MOST_LOG_RATIO)
        kl_T = towards_T.exp() - towards_T - 1
        loss_T = loss_T + kl_beta * kl_T
        kl_reference = kl_T.detach().sum()
    with torch.no_grad():
        stopped_T = torch.where(advantage_T > 0, ratio_T > 1 + clip_high, ratio_T < 1 - clip_low)
        kl_behaviour = (ratio_T - log_ratio_T - 1).sum()
    return LossTerms(loss_T.sum(), ratio_T.detach().sum(), stopped_T.sum(), kl_behaviour, kl_reference)
