"""When the engine's own logprobs are taken for what an earlier version sampled, in place of one more pass.

Every engine has proven each version before it serves it; here one of the version's groups shows that it also
samples as exactly, by the policy's own pass over that group. Each step asks about the next one. All ranks ask
about the same group and come to one answer: the group is chosen among the step's sequences, not the rank's.
Not in bf16, nor for a narrow clip: their rounding is what C51 is about.
Neighbours: `old_logprobs.py` asks; `update.py` says of what.

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
    from runtime.trainer.policy import Policy
    from runtime.trainer.settings import UpdateSettings

# A token that was nearly certain (above 0.9) is nearly certain to anybody, and shows nothing.
_TELLING = -0.1
_ENOUGH = 16


@dataclass(frozen=True)
class Trust:
    """`within`: nats that no token asked about may be off by. `sequences`: those that the step trains."""

    within: float
    sequences: Sequence[int]
    ranks: Ranks

    @classmethod
    def of(
        cls, policy: Policy, settings: UpdateSettings, sequences: Sequence[int], ranks: Ranks
    ) -> Trust | None:
        """None where the engine's word is never taken."""
        within = settings.negligible
        return cls(within, sequences, ranks) if within and policy.exact else None

    def asked(self, batch: Batch, theirs_N: Tensor) -> list[int]:
        """The sequences to compute: of one of the groups that have such tokens, another one at each step."""
        group_of = {
            sequence: int(batch.group[batch.member[sequence]])
            for sequence in self.sequences
            if bool(theirs_N[batch.span(sequence)].any())
        }
        groups = sorted(set(group_of.values()))
        return [one for one, group in group_of.items() if group == groups[batch.step % len(groups)]]

    def holds(self, own_N: Tensor, said_N: Tensor, here_N: Tensor) -> bool:
        """Whether the engine was exact, and on enough tokens that tell it. `here_N`: this rank's of them."""
        apart = (own_N - said_N)[here_N].abs().nan_to_num(nan=torch.inf)
        worst = torch.zeros(1, device=self.ranks.device)
        if len(apart):
            worst[0] = apart.max()
        telling = (said_N[here_N] < _TELLING).sum().to(self.ranks.device)
        self.ranks.keep_largest(worst)
        self.ranks.add_up([telling])
        return int(telling) >= _ENOUGH and float(worst) <= self.within
