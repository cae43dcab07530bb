"""The metrics of a step's rewards: mean and spread over its members, and each predictor's own mean.

Neighbours: the trainer has it among a step's metrics (update.py), the gateway among those of an empty step
(steps/empty_steps.py). Knows nothing of models or of losses.
"""

from __future__ import annotations

import numpy as np

from runtime.shared.batch import Batch


def reward_metrics(batch: Batch) -> dict[str, float]:
    """`reward`, `reward_deviation`, and `reward/NAME` for each predictor that is named; of finite ones."""
    rewards = np.asarray(batch.reward, np.float64)
    finite = np.isfinite(rewards)
    if not finite.any():
        return {}
    found = {"reward": float(rewards[finite].mean()), "reward_deviation": float(rewards[finite].std())}
    named = np.asarray(_predictors(batch), dtype=object)
    for name in dict.fromkeys(name for name in named if name):
        of_it = rewards[finite & (named == name)]
        if len(of_it):
            found[f"reward/{name}"] = float(of_it.mean())
    return found


def _predictors(batch: Batch) -> list[str | None]:
    """Each member's predictor: its own word, else its group's."""
    groups, members = batch.meta.get("groups") or [], batch.meta.get("members") or []
    if len(members) != len(batch.reward):
        return [None] * len(batch.reward)
    return [
        member.get("predictor") or (groups[group].get("predictor") if group < len(groups) else None)
        for member, group in zip(members, batch.group.tolist(), strict=True)
    ]
