"""Two sides' runs compared: how long a step takes, how long it takes to a reward that both reach.

Neighbours: `launcher/bench/side_run.py` has a run, `report.py` shows what is found. Pure: knows nothing of
files or processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.bench.side_run import SideRun

# A reward is a mean over so many steps.
WINDOW = 5
# Of the lower final reward of both sides so much is the reward that both must reach.
SHARE_OF_FINAL = 0.9
# Ours by theirs, at most.
STEP_TARGET, REWARD_TARGET, REWARD_GOAL = 0.6, 0.7, 0.5


@dataclass(frozen=True)
class Pair:
    """Both sides with one seed, run one after the other. None: a reward that is never reached."""

    seed: int
    step_seconds: tuple[float, float]
    reward: float | None
    reward_seconds: tuple[float | None, float | None]

    @classmethod
    def of(cls, ours: SideRun, theirs: SideRun, first_step: int) -> Pair:
        """Both must reach a share of the lower final reward; of one below 0 a share is above it."""
        final = min(rewards_over(run, WINDOW)[-1] for run in (ours, theirs))
        reward = SHARE_OF_FINAL * final if final > 0 else None
        return cls(
            ours.seed,
            (ours.median_seconds(first_step), theirs.median_seconds(first_step)),
            reward,
            (None, None)
            if reward is None
            else (seconds_to(ours, reward, WINDOW), seconds_to(theirs, reward, WINDOW)),
        )

    @property
    def step_ratio(self) -> float:
        """Ours by theirs."""
        return self.step_seconds[0] / self.step_seconds[1]

    @property
    def reward_ratio(self) -> float | None:
        """Ours by theirs; none where one of them never gets there."""
        ours, theirs = self.reward_seconds
        return None if ours is None or theirs is None else ours / theirs

    def to_dict(self) -> dict[str, Any]:
        """As the result has it."""
        return {
            "seed": self.seed,
            "step_seconds": [_rounded(it) for it in self.step_seconds],
            "step_ratio": _rounded(self.step_ratio),
            "reward": _rounded(self.reward),
            "reward_seconds": [_rounded(it) for it in self.reward_seconds],
            "reward_ratio": _rounded(self.reward_ratio),
        }


@dataclass(frozen=True)
class Line:
    """One line of the table: the median over the seeds on each side, and over the seeds' ratios."""

    what: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    target: float

    @property
    def met(self) -> bool | None:
        """Whether it is as hoped for; None where there is no ratio."""
        return None if self.ratio is None else self.ratio <= self.target

    def to_dict(self, judged: bool) -> dict[str, Any]:
        """As the result has it."""
        return {
            "what": self.what,
            "ours_seconds": _rounded(self.ours),
            "theirs_seconds": _rounded(self.theirs),
            "ratio": _rounded(self.ratio),
            "target": self.target,
            "met": self.met if judged else None,
        }


def lines(pairs: Sequence[Pair], first_step: int, last_step: int) -> list[Line]:
    """The two lines that are hoped for."""
    return [
        Line(
            f"a step, median of steps {first_step} to {last_step}",
            _median([pair.step_seconds[0] for pair in pairs]),
            _median([pair.step_seconds[1] for pair in pairs]),
            _median([pair.step_ratio for pair in pairs]),
            STEP_TARGET,
        ),
        Line(
            f"training to {SHARE_OF_FINAL:.0%} of the lower final reward",
            _median([pair.reward_seconds[0] for pair in pairs]),
            _median([pair.reward_seconds[1] for pair in pairs]),
            _median([pair.reward_ratio for pair in pairs]),
            REWARD_TARGET,
        ),
    ]


def rewards_over(run: SideRun, window: int) -> list[float]:
    """After each step, the mean of the last `window` rewards; before there are so many, none."""
    rewards = [step.reward for step in run.steps]
    width = min(window, len(rewards))
    return [statistics.fmean(rewards[at - width : at]) for at in range(width, len(rewards) + 1)]


def seconds_to(run: SideRun, reward: float, window: int) -> float | None:
    """Seconds of training until the mean of the last steps is that high; None where it never is."""
    means = rewards_over(run, window)
    ends = [step.ended for step in run.steps[len(run.steps) - len(means) :]]
    return next((end for end, mean in zip(ends, means, strict=True) if mean >= reward), None)


def _median(values: Sequence[float | None]) -> float | None:
    """None where one is missing: the median of the others would be a better one than there is."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found and len(found) == len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
