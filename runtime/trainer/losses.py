"""The losses as pure tensors: advantages within a group, ratios and their bounds, diagnostics.

Neighbours: `update.py` feeds it, `packing.py` lays the sequences out. Knows no torchtune, vLLM or files.

Names carry dimensions: M members, A answers, T sampled tokens (of a micro-batch), V vocabulary, D width,
G lags (staleness.py).
Sources: `runtime/shared/train_config.py` names the papers beside each loss's defaults.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.shared.learnable import without_variance
from runtime.trainer.compiling import Compiled

# Added to a deviation, as in TRL: rewards are fp32, and the effect of their rounding must stay small.
_EPSILON = 1e-4
# Far beyond any clip; past e^88 a ratio would be infinite and its gradient NaN even where it is clipped.
_MAX_LOG_RATIO = 20.0
_NO_LOGIT = torch.finfo(torch.float32).min


def advantages(reward_M: Tensor, group_M: Tensor, *, scale: bool = False) -> Tensor:
    """Reward minus the mean of its group [M], over members with a finite reward; optionally over its
    deviation.

    In a group without variance (`learnable.py`) it is exactly 0: rounding in a mean must not become a
    gradient. Members without a finite reward leave the mean.
    """
    reward_M = reward_M.double()
    scored_M = torch.isfinite(reward_M)
    flat_M = torch.from_numpy(without_variance(reward_M.numpy(), group_M.numpy())[0])
    value_M = torch.zeros_like(reward_M)
    for group in group_M[scored_M & ~flat_M].unique().tolist():
        members = (group_M == group) & scored_M
        rewards = reward_M[members]
        centred = rewards - rewards.mean()
        value_M[members] = centred / (rewards.std(correction=0) + _EPSILON) if scale else centred
    return value_M.float()


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
    allowed_TW: Tensor | None = None,
    *,
    chunk: int = 1024,
) -> TokenLogprobs:
    """Logprobs of `target_T` in fp32, logits divided by the temperature *before* the log-softmax.

    `output` maps hidden states to logits. `allowed_TW`: a bit for each token that could be sampled
    (`grammar_masks.py`); None: any. Chunks bound the memory to chunk x V; with more than one, logits are
    recomputed in the backward pass rather than kept.
    """
    tokens = len(target_T)
    chunk_logprobs = _chunk_function(hidden_TD.device.type)
    if chunk_logprobs is not _logprob_chunk:  # compiled for one length
        more = -tokens % chunk
        hidden_TD = functional.pad(hidden_TD, (0, 0, 0, more))
        target_T = functional.pad(target_T, (0, more))
        temperature_T = functional.pad(temperature_T, (0, more), value=1.0)
        if allowed_TW is not None:
            allowed_TW = functional.pad(allowed_TW, (0, 0, 0, more), value=-1)
    pieces = []
    for start in range(0, len(target_T), chunk):
        part = slice(start, start + chunk)
        allowed = None if allowed_TW is None else allowed_TW[part]
        arguments = (hidden_TD[part], output, target_T[part], temperature_T[part], allowed)
        if len(target_T) > chunk and hidden_TD.requires_grad:
            pieces.append(checkpoint(chunk_logprobs, *arguments, use_reentrant=False))
        else:
            pieces.append(chunk_logprobs(*arguments))
    logprob_T, entropy_T = (torch.cat(parts)[:tokens] for parts in zip(*pieces, strict=True))
    return TokenLogprobs(logprob_T, entropy_T)


@functools.cache
def _chunk_function(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A chunk's logprobs, in few kernels where the device has compiled ones."""
    return Compiled(_logprob_chunk) if device == "cuda" else _logprob_chunk


def _logprob_chunk(
    hidden_TD: Tensor,
    output: Callable[[Tensor], Tensor],
    target_T: Tensor,
    temperature_T: Tensor,
    allowed_TW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits_TV = output(hidden_TD).float() / temperature_T[:, None]
    if allowed_TW is not None:
        # As good as minus infinity, of which the entropy below would make NaN.
        logits_TV = logits_TV.masked_fill(~_unpacked(allowed_TW, logits_TV.shape[1]), _NO_LOGIT)
    all_TV = logits_TV.log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(all_TV.exp() * all_TV).sum(-1)
    return all_TV.gather(1, target_T[:, None])[:, 0], entropy_T


def _unpacked(bits_TW: Tensor, size: int) -> Tensor:
    """Words of 32 bits, the first token's lowest, as booleans [T, size]; a byte for each on the way."""
    bit = 1 << torch.arange(8, device=bits_TW.device, dtype=torch.uint8)
    return (bits_TW.view(torch.uint8)[:, :, None] & bit).bool().flatten(1)[:, :size]


@dataclass(frozen=True)
class LossTerms:
    """`loss` weighted as the step's normaliser wants; the others are plain sums over T sampled tokens.

    All but `loss` and `kl_reference` are by lag [G]. `ratio`, `ratio_max` and `kl_behaviour` compare with the
    engine's logprobs. `masked`: tokens past `dual_clip`, which teach nothing, and `masked_answers`: the
    answers they stand in; `truncated`: tokens whose mismatch was cut to `mismatch_cap`.
    """

    loss: Tensor
    ratio: Tensor
    ratio_max: Tensor
    clipped: Tensor
    masked: Tensor
    masked_answers: Tensor
    truncated: Tensor
    kl_behaviour: Tensor
    kl_reference: Tensor


def token_weights(length_A: Tensor, normaliser: str, constant_tokens: int | None = None) -> Tensor:
    """The weight of a token of each answer in the step's loss [A], for answers of `length_A` sampled tokens.

    The loss is then a plain sum over tokens, independent of their micro-batches and ranks.
    """
    length_A = length_A.double()
    if normaliser == "token":
        weight_A = torch.full_like(length_A, 1 / float(length_A.sum()))
    elif normaliser == "sequence":
        weight_A = 1 / (len(length_A) * length_A)
    elif normaliser == "constant" and constant_tokens:
        weight_A = torch.full_like(length_A, 1 / (len(length_A) * constant_tokens))
    else:
        raise ValueError(f"no normaliser {normaliser} with constant_tokens={constant_tokens}")
    return weight_A.float()


def policy_loss(
    logprob_T: Tensor,
    behaviour_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    answer_T: Tensor,
    *,
    loss: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
    mismatch_cap: float = math.inf,
    old_T: Tensor | None = None,
    reference_T: Tensor | None = None,
    kl_beta: float = 0.0,
    lag_T: Tensor | None = None,
    buckets: int = 1,
) -> LossTerms:
    """The loss of sampled tokens, with r = exp(logprob - old), each with its weight.

    grpo, dr_grpo, dapo: -min(r A, clip(r, 1 - low, 1 + high) A). gspo: the same with one ratio for a whole
    answer, the geometric mean of its tokens' (an answer never lies in two packs). cispo: -clip(r) A logprob,
    where the clipped ratio is a number: no token's gradient is stopped, its weight is bounded. If A is
    negative only `dual_clip` bounds r from above (Ye et al., equation 5); inside it each loss is that of its
    paper.

    `old_T` are the trainer's own logprobs under the policy that sampled, so that a clip sees the learning
    since then and not the engine's rounding. The engine's distance from them, w = exp(old - behaviour), is a
    factor beside the loss, cut to `mismatch_cap`. Without `old_T` they are the engine's own, and w is 1.

    `kl_beta` adds beta x r w x k3 towards the reference (adapter off). As k3's mean over the policy is
    KL(policy || reference) for any policy, the gradient of r w k3 under the behaviour is that of this KL; k3
    alone would follow KL(reference || policy) of the sampled tokens (DeepSeek-V3.2, section 3.1).

    `lag_T` is the bucket of staleness of each token, 0 to `buckets` - 1: it changes no loss.
    """
    behaviour_T = behaviour_T.detach()
    old_T = behaviour_T if old_T is None else old_T.detach()
    ratio_T = _ratio(logprob_T - old_T, answer_T, loss)
    mismatch_T = _ratio(old_T - behaviour_T, answer_T, loss)
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    if loss == "cispo":
        gain_T = bounded_T.detach() * advantage_T * logprob_T
    else:
        held_T = torch.where(advantage_T < 0, ratio_T.clamp(max=dual_clip), ratio_T)
        gain_T = torch.minimum(held_T * advantage_T, bounded_T * advantage_T)
    loss_T = -gain_T * mismatch_T.clamp(max=mismatch_cap)
    kl_reference = logprob_T.new_zeros(())
    if reference_T is not None:
        kl_T = _kl_to_reference(reference_T.detach(), logprob_T, old_T, behaviour_T, dual_clip, mismatch_cap)
        loss_T = loss_T + kl_beta * kl_T
        kl_reference = kl_T.detach().sum()
    with torch.no_grad():
        clipped_T = torch.where(advantage_T > 0, ratio_T > 1 + clip_high, ratio_T < 1 - clip_low)
        masked_T = (ratio_T > dual_clip) & (advantage_T < 0)
        if loss == "cispo":
            clipped_T, masked_T = bounded_T != ratio_T, torch.zeros_like(masked_T)
        log_engine_T = (logprob_T - behaviour_T).clamp(max=_MAX_LOG_RATIO)
        engine_T = log_engine_T.exp()
        place_T = torch.zeros_like(answer_T) if lag_T is None else lag_T
        here_GT = torch.arange(buckets, device=place_T.device)[:, None] == place_T
        masked_A = (answer_T * buckets + place_T)[masked_T].unique()
    return LossTerms(
        loss=(weight_T * loss_T).sum(),
        ratio=_sums(engine_T, here_GT),
        ratio_max=torch.where(here_GT, engine_T, 0).amax(1),
        clipped=_sums(clipped_T, here_GT),
        masked=_sums(masked_T, here_GT),
        masked_answers=(masked_A % buckets).bincount(minlength=buckets),
        truncated=_sums(mismatch_T > mismatch_cap, here_GT),
        kl_behaviour=_sums(engine_T - log_engine_T - 1, here_GT),
        kl_reference=kl_reference,
    )


def _sums(value_T: Tensor, here_GT: Tensor) -> Tensor:
    """Over the tokens of each lag [G], without a gradient."""
    return torch.where(here_GT, value_T.detach().double(), 0).sum(1)


def sft_loss(
    logprob_T: Tensor, weight_T: Tensor, reference_T: Tensor | None = None, kl_beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of given tokens, -logprob, each with its weight; and the sum of k3 to the reference.

    `kl_beta` adds beta x k3 with the gradient (logprob - reference): the policy did not sample these tokens,
    so no average of theirs is a KL divergence; each is held near its logprob without the adapter.
    """
    loss_T = -logprob_T
    kl_reference = logprob_T.new_zeros(())
    if reference_T is not None:
        now_T = logprob_T.detach()
        kl_T = _kl_to_reference(reference_T.detach(), logprob_T, now_T, now_T, math.inf, math.inf)
        loss_T = loss_T + kl_beta * kl_T
        kl_reference = kl_T.detach().sum()
    return (weight_T * loss_T).sum(), kl_reference


def _ratio(apart_T: Tensor, answer_T: Tensor, loss: str) -> Tensor:
    """How many times as likely each token is [T]; for gspo its answer's geometric mean."""
    if loss == "gspo":
        apart_T = _answer_means(apart_T, answer_T)
    return apart_T.clamp(max=_MAX_LOG_RATIO).exp()


def _kl_to_reference(
    reference_T: Tensor, logprob_T: Tensor, old_T: Tensor, behaviour_T: Tensor, most: float, cap: float
) -> Tensor:
    """r w k3 of each token [T], r w at most `most`, w at most `cap`.

    Its gradient is written down, r w (logprob - reference): the same inside the bounds, and past them it
    grows with the distance and not with its exponential.
    """
    now_T = logprob_T.detach()
    since_T = (now_T - old_T).clamp(max=_MAX_LOG_RATIO).exp()
    mismatch_T = (old_T - behaviour_T).clamp(max=_MAX_LOG_RATIO).exp()
    scale_T = (since_T * mismatch_T.clamp(max=cap)).clamp(max=most)
    towards_T = (reference_T - now_T).clamp(max=_MAX_LOG_RATIO)
    value_T = scale_T * (towards_T.exp() - towards_T - 1)
    slope_T = scale_T * (now_T - reference_T)
    return value_T + slope_T * (logprob_T - now_T)


def _answer_means(value_T: Tensor, answer_T: Tensor) -> Tensor:
    """Each token's mean over the tokens of its answer [T]."""
    _, place_T = answer_T.unique(return_inverse=True)
    tokens_A = place_T.bincount().to(value_T.dtype)
    return (torch.zeros_like(tokens_A).index_add(0, place_T, value_T) / tokens_A)[place_T]
