"""The record of one step of `GRPO`: how its runs ended, their rewards, and the run's status of it.

Neighbours: `dspy/training.py` makes it, once a step; alarms, the journal, the report and the guards read it.
Pure: knows nothing of DSPy, wire or clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from launcher.client import standard_error
from launcher.client.schema import StepStatus


@dataclass(frozen=True)
class StepRollouts:
    """A step's runs and their answers. NaN: not measured.

    `rewards` of each predictor; `by_example` the same ones of each example. `outcomes`: how many runs ended
    how. `parse_rate`, `cut_off_rate`: shares of the answered runs. `length`: the mean answer, in tokens.
    `repetition`: the mean share of an answer's four-word sequences that occurred in it before.
    `reward_length`, `reward_repetition`: the correlation of a run's score with them, within examples.
    `staleness`: by the number of steps that a version is older than the newest, the number of answers that
    it sampled.
    `failure`: how another model or a judge failed, of one run that it failed.
    """

    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    by_example: Sequence[Sequence[float]] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    parse_rate: float = math.nan
    cut_off_rate: float = math.nan
    length: float = math.nan
    repetition: float = math.nan
    reward_length: float = math.nan
    reward_repetition: float = math.nan
    staleness: Mapping[int, int] = field(default_factory=dict)
    failure: str | None = None

    @property
    def all_rewards(self) -> list[float]:
        """The rewards of all predictors."""
        return [reward for rewards in self.rewards.values() for reward in rewards]


@dataclass(frozen=True)
class StepRecord:
    """Step `step` (1 is the first) in epoch `epoch` of the trainset. Times are in seconds.

    `resampled`: groups that were rolled out besides the step's own, as those had no variance. `stale`:
    examples that were left out since the step before, as they had become too old.
    """

    step: int
    epoch: int
    rollouts: StepRollouts
    status: StepStatus
    rollout_seconds: float = math.nan
    train_seconds: float = math.nan
    resampled: int = 0
    stale: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it could be trained, so that it has no version."""
        return self.status.state == "empty"

    def to_dict(self) -> dict[str, Any]:
        """The step as it is printed and written.

        `spread` is the standard deviation of all rewards, `standard_error` that of their mean `reward`, with
        the examples as the independent draws (`standard_error.of_groups`); NaN of one example alone.
        """
        rollouts, rewards = self.rollouts, self.rollouts.all_rewards
        return {
            "step": self.step,
            "epoch": self.epoch,
            "version": self.status.version,
            "reward": fmean(rewards) if rewards else math.nan,
            "spread": pstdev(rewards) if rewards else math.nan,
            "rewards": {name: fmean(it) for name, it in rollouts.rewards.items() if it},
            "parse_rate": rollouts.parse_rate,
            "cut_off_rate": rollouts.cut_off_rate,
            "length": rollouts.length,
            "repetition": rollouts.repetition,
            "reward_length": rollouts.reward_length,
            "reward_repetition": rollouts.reward_repetition,
            "outcomes": dict(rollouts.outcomes),
            "counts": self.status.counts.model_dump(),
            "metrics": dict(self.status.metrics),
            "rollout_seconds": round(self.rollout_seconds, 3),
            "train_seconds": round(self.train_seconds, 3),
            "groups_again": self.resampled,
            "lags": {str(lag): count for lag, count in rollouts.staleness.items()},
            "groups_stale": self.stale,
            "standard_error": standard_error.of_groups(rollouts.by_example),
        }
