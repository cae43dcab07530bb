"""The one rule of what a batch can teach: the sequences that are trained, and why the others are not.

Neighbours: the gateway asks before it gives a step a number (steps/empty_steps.py) and before it hands one
over; the trainer asks in each update (trainer/update.py). numpy only. Knows nothing of models, losses or
gradients: advantages are the trainer's.

Names carry dimensions: M members, S sequences, A answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.shared.batch import Batch
from runtime.shared.train_config import ResolvedTrainConfig

# All rewards of its group are equal, so that its advantage is 0.
NO_VARIANCE = "no variance in its group"


@dataclass(frozen=True)
class Usable:
    """`sequences`: those with something to learn from; `dropped`: the samples of the others, by reason.

    `why`: the reason of each sequence that is dropped. `reward_M`: with the penalty for length; NaN for a
    member of which nothing can be trained. `zero_variance_groups`: the number of groups that teach nothing.
    """

    sequences: list[int]
    dropped: Counter[str]
    why: dict[int, str]
    reward_M: NDArray[np.float64]
    penalty_M: NDArray[np.float64]
    zero_variance_groups: int

    def counted(self, counts: Mapping[str, Any], batch: Batch, tokens: int) -> dict[str, Any]:
        """The gateway's counts, with the sequences dropped here moved from trained to dropped.

        `tokens`: the sampled tokens of the trained sequences.
        """
        dropped = Counter[str](counts.get("dropped") or {}) + self.dropped
        return dict(counts) | {
            "trained": int(batch.turns[self.sequences].sum()),
            "sampled_tokens": tokens,
            "dropped": dict(dropped),
            "groups_without_variance": self.zero_variance_groups,
        }


def learnable(batch: Batch, settings: ResolvedTrainConfig) -> Usable:
    """Sort the batch's sequences into trained and dropped. Every sequence is one or the other.

    Sequences of a group without variance have advantage 0: they are left out, and leave the denominators,
    unless a KL term applies to them. This is the half of DAPO's dynamic sampling that can be done here. The
    other half, to roll out more until there are enough groups with variance, is the program's, which reads
    `groups_without_variance` of the step. So dapo leaves them out with any KL term. A member none of whose
    sequences can be trained leaves the mean of its group too: masked answers that earn more than whole ones
    would push the whole ones down.
    """
    reasons = [_drop_reason(batch, sequence, settings) for sequence in range(batch.sequences)]
    usable = {int(batch.member[sequence]) for sequence, reason in enumerate(reasons) if reason is None}
    penalty_M = _overlong_penalties(batch, settings)
    reward_M = batch.reward.astype(np.float64) + penalty_M
    reward_M[[member for member in range(len(reward_M)) if member not in usable]] = np.nan
    flat_M, zero_variance_groups = without_variance(reward_M, batch.group)
    keep_zero_variance = settings.kl_beta > 0 and settings.loss != "dapo"
    why: dict[int, str] = {}
    dropped = Counter[str]()
    for sequence, reason in enumerate(reasons):
        if reason is None and flat_M[batch.member[sequence]] and not keep_zero_variance:
            reason = NO_VARIANCE
        if reason is not None:
            why[sequence] = reason
            dropped[reason] += int(batch.turns[sequence])
    kept = [sequence for sequence in range(batch.sequences) if sequence not in why]
    return Usable(kept, dropped, why, reward_M, penalty_M, zero_variance_groups)


def without_variance(
    reward_M: NDArray[np.float64], group_M: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], int]:
    """The scored members whose group teaches nothing [M], and the number of such groups.

    The rewards of such a group are all equal, or it has fewer than two. A member without a finite reward is
    not scored.
    """
    scored_M = np.isfinite(reward_M)
    flat_M = np.zeros_like(scored_M)
    groups = 0
    for group in np.unique(group_M):
        members = (group_M == group) & scored_M
        rewards = reward_M[members]
        if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
            groups += 1
            flat_M |= members
    return flat_M, groups


def answers(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sequence of each answer, and how many of its tokens were sampled [A]."""
    row_A = np.repeat(np.arange(batch.sequences), batch.turns)
    answer_N = batch.answers
    return row_A, np.bincount(answer_N[answer_N >= 0], minlength=len(row_A))


def _overlong_penalties(batch: Batch, settings: ResolvedTrainConfig) -> NDArray[np.float64]:
    """The penalty of each member for its longest answer [M], 0 to -1; 0 unless `overlong` is soft."""
    penalty_M = np.zeros(len(batch.reward))
    if settings.overlong != "soft":
        return penalty_M
    assert settings.overlong_tokens is not None
    assert settings.overlong_buffer is not None
    row_A, length_A = answers(batch)
    penalty_A = overlong_penalty(length_A, settings.overlong_tokens, settings.overlong_buffer)
    np.minimum.at(penalty_M, batch.member[row_A], penalty_A)
    return penalty_M


def overlong_penalty(length_A: NDArray[np.int64], longest: int, buffer: int) -> NDArray[np.float64]:
    """0 up to `longest - buffer` tokens, then falling to -1 at `longest` [A] (DAPO, equation 13)."""
    return ((longest - buffer - length_A) / buffer).clip(-1, 0)


def _drop_reason(batch: Batch, sequence: int, settings: ResolvedTrainConfig) -> str | None:
    """The reason why a sequence cannot be trained, for any reward of its group; None when it can.

    No reason here grows likelier with a sequence's length, except the length limit, which is a setting (C19).
    """
    span = batch.span(sequence)
    behaviour = batch.logprobs[span][batch.sampled[span].astype(bool)]
    if not np.isfinite(batch.reward[batch.member[sequence]]):
        return "reward not finite"
    if len(behaviour) == 0:
        return "nothing sampled"
    if sequence in batch.of_other_grammars:
        return "held to another grammar"
    if not np.isfinite(behaviour).all():
        return "logprob not finite"
    return "truncated" if settings.overlong == "mask" and batch.truncated[sequence] else None
