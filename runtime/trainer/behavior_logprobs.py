"""Decides when the engine's logprobs replace one more forward pass for samples of an earlier version.

Every engine was verified for each version before it serves it. Here the policy's own pass over one of the
version's groups shows that the engine also samples as exactly. Each step asks about the next one. All ranks
ask about the same group and come to one answer: the group is chosen among the step's sequences, not the
rank's. Not in bf16, nor for a narrow clip, because of their rounding (C51).
Neighbours: `old_logprobs.py` asks; `update.py` passes the tokens.

Names carry dimensions: N tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.trainer.ranks import Ranks

if TYPE_CHECKING:
    from runtime.shared.step_settings import UpdateSettings
    from runtime.trainer.policy import Policy

# A token that was nearly certain (above 0.9) is nearly certain to any policy, and proves nothing.
_INFORMATIVE_BELOW = -0.1
_MIN_INFORMATIVE_TOKENS = 16


@dataclass(frozen=True)
class BehaviorLogprobReuse:
    """`tolerance`: the largest difference in nats of any compared token. `sequences`: those that the step
    trains."""

    tolerance: float
    sequences: Sequence[int]
    ranks: Ranks

    @classmethod
    def of(
        cls, policy: Policy, settings: UpdateSettings, sequences: Sequence[int], ranks: Ranks
    ) -> BehaviorLogprobReuse | None:
        """The object, or None if the engine's logprobs are never reused."""
        tolerance = settings.negligible_difference
        return cls(tolerance, sequences, ranks) if tolerance and policy.is_fp32 else None

    def sequences_to_compare(self, batch: Batch, theirs_N: Tensor) -> list[int]:
        """The sequences to compute: of one of the groups that have such tokens, another one at each step."""
        group_of = {
            sequence: int(batch.group[batch.member[sequence]])
            for sequence in self.sequences
            if bool(theirs_N[batch.span(sequence)].any())
        }
        groups = sorted(set(group_of.values()))
        return [one for one, group in group_of.items() if group == groups[batch.step % len(groups)]]

    def engine_is_exact(self, own_N: Tensor, behavior_N: Tensor, here_N: Tensor) -> bool:
        """Whether the engine was exact, on enough tokens to judge. `here_N`: those of this rank."""
        error = (own_N - behavior_N)[here_N].abs().nan_to_num(nan=torch.inf)
        worst = torch.zeros(1, device=self.ranks.device)
        if len(error):
            worst[0] = error.max()
        informative = (behavior_N[here_N] < _INFORMATIVE_BELOW).sum().to(self.ranks.device)
        self.ranks.all_reduce_max(worst)
        self.ranks.all_reduce_sum([informative])
        return int(informative) >= _MIN_INFORMATIVE_TOKENS and float(worst) <= self.tolerance
