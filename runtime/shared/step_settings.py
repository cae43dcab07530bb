"""The settings of one step: the run's `train.` keys, overridden by the step's own (C60).

Neighbours: the gateway checks a step with `resolve` before it takes one in, the recipe reads an update's
settings from its keys and the batch, and `trainer/update.py` computes with them.
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from runtime.shared.schema import StepSettings
from runtime.shared.train_config import (
    LOSSES,
    LoraConfig,
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
# Engines in fp32 prove each version to 1e-3 nats (gateway/engines/version_check.py).
_WIDE_CLIP = 0.05


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


class UpdateSettings(ResolvedTrainConfig):
    """An update's settings: the recipe's keys overridden by the step's, checked and resolved.

    `learning_rate` is that of the very step, by its schedule; `recorded` has the settings as they were given,
    for people and for a replay of the step.
    """

    recorded: Mapping[str, Any] = {}

    @property
    def negligible_difference(self) -> float:
        """The difference in nats below which the clip treats two logprobs as equal.

        0 if there is none: a narrow clip, as gspo's, sees the rounding between any two kernels.
        """
        bound = min(self.clip_low, self.clip_high, 1.0)
        return bound / 1000 if bound >= _WIDE_CLIP else 0.0

    @classmethod
    def of(cls, keys: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Self:
        """The settings of a step, from the recipe's configuration and its batch. Raises SettingsError.

        `meta`: the batch's; None for the run's settings of every step, as in its first.
        """
        meta = meta or {}
        resolved = resolve(
            run_settings(keys),
            _step_settings(meta),
            meta.get("step", 1),
            supervised=meta.get("kind") == "supervised",
        )
        values = dict(resolved.train)
        values |= {"learning_rate": resolved.learning_rate, "recorded": resolved.recorded()}
        return cls.model_construct(**values)


def run_settings(keys: Mapping[str, Any]) -> TrainConfig:
    """The run's settings, from the recipe's configuration (`recipes/command.py`); a key that is not there has
    its default. Raises SettingsError."""
    lora = {name: keys[f"lora_{name}"] for name in LoraConfig.model_fields if f"lora_{name}" in keys}
    own = {name: keys[name] for name in TrainConfig.model_fields if name in keys}
    try:
        return TrainConfig.model_validate(own | {"lora": lora})
    except ValidationError as error:
        key, _, why = first_error(error)
        name = key.replace("lora.", "lora_", 1)
        raise SettingsError(name, keys.get(name), why) from None


def _step_settings(meta: Mapping[str, Any]) -> StepSettings:
    try:
        return StepSettings.model_validate(meta.get("settings") or {})
    except ValidationError as error:
        key, _, why = first_error(error)
        raise SettingsError(f"settings.{key}", meta["settings"], why) from None


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
