"""The settings of an update: the recipe's keys overridden by the step's, checked and resolved.

Neighbours: shared/step_settings.py puts the two together; shared/train_config.py has the names, the bounds
and the defaults; update.py reads these. Keys that no update reads (the adapter's) are the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from runtime.shared.schema import StepSettings
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_config import TrainConfig, first_error

__all__ = ["SettingsError", "UpdateSettings"]

# Engines in fp32 prove each version to 1e-3 nats (gateway/engines/version_check.py).
_WIDE_CLIP = 0.05

_KEYS = TrainConfig.model_fields.keys() - {"lora", "activation_checkpointing", "seed", "keep_checkpoints"}


@dataclass(frozen=True)
class UpdateSettings:
    """`TrainConfig.resolved()`, in the types that it has then: nothing the loss decides is None any more.

    `learning_rate` is that of the very step, by its schedule; `recorded` has all settings, for people and for
    a replay of the step.
    """

    learning_rate: float
    weight_decay: float
    loss: str
    normaliser: str
    constant_tokens: int | None
    scale_rewards: bool
    clip_low: float
    clip_high: float
    dual_clip: float
    mismatch_cap: float
    kl_beta: float
    overlong: str
    overlong_tokens: int | None
    overlong_buffer: int | None
    max_grad_norm: float
    pack_tokens: int
    recorded: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def negligible_difference(self) -> float:
        """The difference in nats below which the clip treats two logprobs as equal.

        0 if there is none: a narrow clip, as gspo's, sees the rounding between any two kernels.
        """
        bound = min(self.clip_low, self.clip_high, 1.0)
        return bound / 1000 if bound >= _WIDE_CLIP else 0.0

    @classmethod
    def of(cls, keys: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> UpdateSettings:
        """The settings of a step, from the recipe's configuration and its batch. Raises SettingsError.

        `meta`: the batch's; None for the run's settings of every step, as in its first.
        """
        meta = meta or {}
        settled = resolve(
            _run_settings(keys),
            _step_settings(meta),
            meta.get("step", 1),
            supervised=meta.get("kind") == "supervised",
        )
        names = cls.__dataclass_fields__.keys() - {"learning_rate", "recorded"}
        values = {name: getattr(settled.train, name) for name in names}
        return cls(**values, learning_rate=settled.learning_rate, recorded=settled.recorded())


def _run_settings(keys: Mapping[str, Any]) -> TrainConfig:
    try:
        return TrainConfig(**{name: keys[name] for name in _KEYS})
    except ValidationError as error:
        key, _, why = first_error(error)
        raise SettingsError(key, keys[key], why) from None


def _step_settings(meta: Mapping[str, Any]) -> StepSettings:
    try:
        return StepSettings.model_validate(meta.get("settings") or {})
    except ValidationError as error:
        key, _, why = first_error(error)
        raise SettingsError(f"settings.{key}", meta["settings"], why) from None
