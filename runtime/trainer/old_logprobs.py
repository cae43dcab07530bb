"""What the trainer itself makes of tokens that an earlier version of the policy sampled (C51).

A ratio's clip compares with it and not with what the engine said: between engine and trainer lies rounding,
which is not what was learned since. Of the version that is trained now it is the step's own forward pass.
Neighbours: `update.py` asks, once a step; the recipe knows where adapters are kept.
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
from runtime.trainer.forward import pack_logprobs
from runtime.trainer.packing import Pack

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy


@dataclass(frozen=True)
class Past:
    """The version the policy is now, and the adapters of others; None where one is not kept any more."""

    version: int
    adapter_of: Callable[[int], Path | None]

    def wearing(self, policy: Policy, version: int) -> AbstractContextManager[None] | None:
        """Inside, the policy computes as that version did; None when nobody can say how."""
        folder = self.adapter_of(version)
        if folder is not None:
            return policy.wearing(folder)
        return policy.reference() if version == 0 else None  # before the first step the adapter does nothing


@dataclass(frozen=True)
class Old:
    """Old logprobs of the step's tokens [N], NaN where the step's own forward pass has them.

    Two kinds of tokens have the engine's logprobs here. `unkept`: those of versions that are not kept.
    `trusted`: those of versions in which the engine was seen to be as exact as the trainer.
    """

    logprob_N: Tensor
    unkept: int
    trusted: int = 0

    def beside(self, one: Pack, now_T: Tensor) -> Tensor:
        """Of a pack's tokens [T]; `now_T`: its own logprobs, without a gradient."""
        old_T = self.logprob_N[one.source_T].to(now_T.device)
        return torch.where(old_T.isnan(), now_T, old_T)


def old_logprobs(
    policy: Policy,
    batch: Batch,
    packs: Sequence[Pack],
    past: Past | None,
    lay_out: Callable[[list[int]], list[Pack]],
    within: float = 0.0,
) -> Old:
    """One more forward pass for every earlier version in these packs, over the sequences that it is in.

    Those are laid out anew, without the others: a sequence is computed once for each of its versions, and
    packing changes nothing but rounding (C41). Without a past everything was sampled by the policy as it is.

    Where an fp32 policy finds no token of one of a version's groups further than `within` nats from what the
    engine said, the engine's word is taken for the version's others. Each step asks about the next group.
    """
    old_N = torch.full((len(batch.tokens),), torch.nan)
    version_N = torch.from_numpy(batch.sampled_by)
    if past is None:
        return Old(old_N, 0)

    def fill(chosen: list[int], theirs_N: Tensor) -> None:
        for one in lay_out(chosen) if chosen else ():
            here_T = theirs_N[one.source_T]
            found = pack_logprobs(policy, one, batch).logprob_T.cpu()
            old_N[one.source_T[here_T]] = found[here_T]

    met = {version for one in packs for version in version_N[one.source_T].unique().tolist()}
    unkept = trusted = 0
    behaviour_N = torch.from_numpy(batch.logprobs)
    for version in sorted(met - {past.version}):
        theirs_N = version_N == version
        inside = past.wearing(policy, version)
        if inside is None:
            old_N[theirs_N] = behaviour_N[theirs_N]
            unkept += sum(int(theirs_N[one.source_T].sum()) for one in packs)
            continue
        chosen = _sequences(packs, theirs_N)
        asked = _one_group(batch, chosen) if within > 0 and policy.exact else []
        with torch.no_grad(), inside:
            fill(asked, theirs_N)
            left_N = theirs_N & old_N.isnan()
            apart = (old_N - behaviour_N)[theirs_N & ~left_N].abs()
            if len(apart) and float(apart.max()) <= within:
                old_N[left_N] = behaviour_N[left_N]
                trusted += sum(int(left_N[one.source_T].sum()) for one in packs)
            else:
                fill([sequence for sequence in chosen if sequence not in asked], theirs_N)
    return Old(old_N, unkept, trusted)


def _sequences(packs: Sequence[Pack], theirs_N: Tensor) -> list[int]:
    """The sequences of these packs that have such a token."""
    found = [one.sequence_T[theirs_N[one.source_T]].unique() for one in packs]
    return sorted({sequence for some in found for sequence in some.tolist()})


def _one_group(batch: Batch, chosen: list[int]) -> list[int]:
    """Those of these sequences that are in one of their groups, another one at each step."""
    group_of = {sequence: int(batch.group[batch.member[sequence]]) for sequence in chosen}
    groups = sorted(set(group_of.values()))
    return [sequence for sequence in chosen if group_of[sequence] == groups[batch.step % len(groups)]]
