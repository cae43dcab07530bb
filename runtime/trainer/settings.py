"""What an update is told: the recipe's keys, checked and with the loss's own values filled in.

Neighbours: shared/train_config.py has the names, the bounds and the defaults; update.py reads these. A key
that no update reads (the optimizer's, the adapter's) is the recipe's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from runtime.shared.train_config import TrainConfig, complaint


class SettingsError(Exception):
    """The recipe's keys make no step; the text names the key, why, and the way out."""


@dataclass(frozen=True)
class UpdateSettings:
    """`TrainConfig.resolved()`, in the types that it has then: nothing the loss decides is None any more."""

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

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> UpdateSettings:
        """Read the fields out of the recipe's configuration. Raises SettingsError."""
        try:
            train = TrainConfig(**{name: keys[name] for name in cls.__dataclass_fields__}).resolved()
        except ValidationError as error:
            key, _, why = complaint(error)
            raise SettingsError(f"{key}={keys[key]} does not fit: {why}") from None
        return cls(**{name: getattr(train, name) for name in cls.__dataclass_fields__})
