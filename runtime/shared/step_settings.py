"""The settings of one step: the run's `train.` keys, overridden by the step's own (C60).

Neighbours: the gateway checks a step with it before it takes one in, the trainer computes with its result.
`train_config.py` has the names, bounds and contradictions.

A key that the step does not set has the run's value. But if the step sets a loss that is not the run's, the
loss brings its own values: the run's `normaliser`, `constant_tokens`, `scale_rewards` and clips were chosen
for another loss. In the same way another `schedule` does not take the run's `schedule_steps`, another
`overlong` does not take its tokens, and another normaliser not its `constant_tokens`. `warmup_steps` holds
for every schedule.

A supervised step has no rewards, and the run's settings of a loss do not apply to it. Its tokens count alike,
or its answers with `normaliser=sequence`, and only its own `kl_beta` adds a KL term. A loss's keys are
refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from runtime.shared.schema import StepSettings
from runtime.shared.train_config import (
    LOSSES,
    ResolvedTrainConfig,
    TrainConfig,
    first_error,
    settings_of,
    use_of,
)

# Keys that only a loss of rewards reads.
_REWARD_KEYS = settings_of("rewards")
# A supervised step has these keys' defaults here, or its own values, never the run's.
_NOT_INHERITED = settings_of("rewards", "loss")


class SettingsError(Exception):
    """The keys make no step: `key`, its value, and `why`, with the way out."""

    def __init__(self, key: str, value: Any, why: str) -> None:
        super().__init__(f"{key}={value} does not fit: {why}")
        self.key = key


@dataclass(frozen=True)
class ResolvedSettings:
    """One step's settings. `train` is resolved; `schedule_step`: its place in the schedule, from 0."""

    train: ResolvedTrainConfig
    schedule_step: int
    supervised: bool = False

    @property
    def learning_rate(self) -> float:
        """The rate of this very step."""
        return self.train.learning_rate * _schedule_factor(self.train, self.schedule_step)

    def recorded(self) -> dict[str, Any]:
        """All of it in plain values, under the names that `StepSettings` and TrainConfig have."""
        read = {*settings_of("optimizer", "loss"), *(() if self.supervised else _REWARD_KEYS)}
        return self.train.model_dump(include=read) | {"schedule_step": self.schedule_step}


def resolve(
    run: TrainConfig, overrides: StepSettings | None, step: int, *, supervised: bool = False
) -> ResolvedSettings:
    """Override the run's settings by the step's. `step`: its number, from 1. Raises SettingsError."""
    own = {} if overrides is None else overrides.model_dump(exclude_none=True)
    if supervised:
        _refuse_reward_keys(own)
        run = run.model_copy(update={key: _default(key) for key in _NOT_INHERITED})
    place = own.pop("schedule_step", step - 1)
    values = run.model_dump()
    for key in TrainConfig.model_fields:
        if any(_is_changed(choice, run, own) for choice in use_of(TrainConfig, key).belongs_to):
            values[key] = _default(key)
    values |= own
    try:
        return ResolvedSettings(TrainConfig.model_validate(values).resolved(), place, supervised)
    except ValidationError as error:
        key, _, why = first_error(error)
        raise SettingsError(key, values.get(key), why) from None


def _refuse_reward_keys(own: dict[str, Any]) -> None:
    for key in _REWARD_KEYS:
        if key in own:
            raise SettingsError(
                key, own[key], "a step that learns from examples has no rewards: leave it out"
            )
    if own.get("normaliser") == "constant":
        raise SettingsError("normaliser", "constant", "examples count by token or by sequence")


def _default(key: str) -> Any:
    return TrainConfig.model_fields[key].default


def _is_changed(choice: str, run: TrainConfig, own: dict[str, Any]) -> bool:
    before = getattr(run, choice)
    if choice == "normaliser":
        before = before or LOSSES[run.loss].normaliser
    return own.get(choice, before) != before


def _schedule_factor(train: TrainConfig, place: int) -> float:
    """The part of its learning rate that a schedule has at a step."""
    if place < train.warmup_steps:
        return (place + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    assert train.schedule_steps is not None
    gone = min(1.0, (place - train.warmup_steps) / (train.schedule_steps - train.warmup_steps))
    return 1 - gone if train.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
