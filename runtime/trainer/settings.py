"""The settings of an update: the recipe's keys overridden by the step's, checked and resolved.

Neighbours: shared/step_settings.py puts the two together; shared/train_config.py has the names, the bounds
and the defaults; update.py reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from runtime.shared.schema import StepSettings
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_config import ResolvedTrainConfig, TrainConfig, first_error

__all__ = ["SettingsError", "UpdateSettings", "run_settings"]

# Engines in fp32 prove each version to 1e-3 nats (gateway/engines/version_check.py).
_WIDE_CLIP = 0.05


class UpdateSettings(ResolvedTrainConfig):
    """`learning_rate` is that of the very step, by its schedule; `recorded` has the settings as they were
    given, for people and for a replay of the step."""

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
    """The run's settings, from the recipe's configuration. Raises SettingsError."""
    try:
        return TrainConfig.of_recipe(keys)
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
