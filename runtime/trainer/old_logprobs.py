"""The trainer's own logprobs of tokens that an earlier version of the policy sampled (C51).

A ratio's clip compares with them and not with the engine's, because engine and trainer differ by rounding,
which is no learning. For the version that is trained now they come from the step's own forward pass.
Neighbours: `update.py` asks, once a step; the recipe knows the adapters' place; `behavior_logprobs.py`
decides when the engine's own are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.trainer.behavior_logprobs import BehaviorLogprobReuse
from runtime.trainer.forward import pack_logprobs
from runtime.trainer.packing import Pack

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy


@dataclass(frozen=True)
class PolicyHistory:
    """The version the policy is now, and the adapters of others; None if one is not kept any more."""

    version: int
    adapter_of: Callable[[int], Path | None]

    def as_version(self, policy: Policy, version: int) -> AbstractContextManager[None] | None:
        """Inside, the policy computes as that version did; None when that version is not kept."""
        folder = self.adapter_of(version)
        if folder is not None:
            return policy.with_adapter(folder)
        return policy.reference() if version == 0 else None  # before the first step the adapter does nothing


@dataclass(frozen=True)
class OldLogprobs:
    """Old logprobs of the step's tokens [N], NaN for tokens that the step's own forward pass covers.

    Two kinds of tokens have the engine's logprobs here. `fallback_tokens`: tokens of versions that are not
    kept. `reused_tokens`: tokens of versions for which the engine was as exact as the trainer.
    """

    logprob_N: Tensor
    fallback_tokens: int
    reused_tokens: int = 0

    def of_pack(self, one: Pack, now_T: Tensor) -> Tensor:
        """The old logprobs of a pack's tokens [T]; `now_T`: its own logprobs, without a gradient."""
        old_T = self.logprob_N[one.source_T].to(now_T.device)
        return torch.where(old_T.isnan(), now_T, old_T)


def old_logprobs(
    policy: Policy,
    batch: Batch,
    packs: Sequence[Pack],
    history: PolicyHistory | None,
    stage: Callable[[list[int]], list[Pack]],
    reuse: BehaviorLogprobReuse | None = None,
) -> OldLogprobs:
    """One more forward pass for every earlier version in these packs, over the sequences that it is in.

    Those are packed again, without the others: a sequence is computed once for each of its versions, and
    packing changes nothing but rounding (C41). Without a history everything counts as sampled by the policy
    as it is. With `reuse` one group of a version is computed first; if that shows the engine to be exact, its
    logprobs are used for the version's others. Raises RankLostError.
    """
    old_N = torch.full((len(batch.tokens),), torch.nan)
    version_N = torch.from_numpy(batch.sampled_by)
    if history is None:
        return OldLogprobs(old_N, 0)

    def fill(chosen: list[int], theirs_N: Tensor) -> None:
        for one in stage(chosen) if chosen else ():
            here_T = theirs_N[one.source_T]
            found = pack_logprobs(policy, one, batch).logprob_T.cpu()
            old_N[one.source_T[here_T]] = found[here_T]

    # With other ranks, the sequences of all, because all come to one answer about each.
    step = reuse.sequences if reuse else _sequences(packs, version_N >= 0)
    met = set(version_N[_within(batch, step)].tolist()) - {-1}
    fallback_tokens = reused_tokens = 0
    behavior_N = torch.from_numpy(batch.logprobs)
    for version in sorted(met - {history.version}):
        theirs_N = version_N == version
        inside = history.as_version(policy, version)
        if inside is None:
            old_N[theirs_N] = behavior_N[theirs_N]
            fallback_tokens += sum(int(theirs_N[one.source_T].sum()) for one in packs)
            continue
        chosen = _sequences(packs, theirs_N)
        compared = reuse.sequences_to_compare(batch, theirs_N) if reuse else []
        first, rest = (
            [one for one in chosen if (one in compared) is is_compared] for is_compared in (True, False)
        )
        with torch.no_grad(), inside:
            fill(first, theirs_N)
            if reuse and reuse.engine_is_exact(old_N, behavior_N, theirs_N & _within(batch, first)):
                left_N = theirs_N & _within(batch, rest)
                old_N[left_N] = behavior_N[left_N]
                reused_tokens += int(left_N.sum())
            else:
                fill(rest, theirs_N)
    return OldLogprobs(old_N, fallback_tokens, reused_tokens)


def _sequences(packs: Sequence[Pack], theirs_N: Tensor) -> list[int]:
    """The sequences of these packs that have such a token."""
    found = [one.sequence_T[theirs_N[one.source_T]].unique() for one in packs]
    return sorted({sequence for some in found for sequence in some.tolist()})


def _within(batch: Batch, sequences: Sequence[int]) -> Tensor:
    """Which tokens are in these sequences [N]."""
    found_N = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for sequence in sequences:
        found_N[batch.span(sequence)] = True
    return found_N
