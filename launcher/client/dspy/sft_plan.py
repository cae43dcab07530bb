"""The examples of each SFT step, and their order, by `train_kwargs` and a seed.

Neighbours: `training_job.py` sends the steps. The names are Hugging Face's, the defaults those of DSPy's own
local trainer. The same in every process, so that a restarted program goes on within it. Knows nothing of the
run, of texts or of DSPy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.client.request_bodies import MOST_EXAMPLES

_EPOCHS, _PER_DEVICE, _ACCUMULATED = 5, 1, 8


@dataclass(frozen=True)
class SFTPlan:
    """`steps` steps of `per_step` examples; an epoch's last step has the remaining ones."""

    examples: int
    per_step: int
    steps: int
    seed: int

    @classmethod
    def of(cls, examples: int, train_kwargs: Mapping[str, Any]) -> SFTPlan:
        """Raises ValueError for invalid values."""
        per_device = _integer(train_kwargs, "per_device_train_batch_size", _PER_DEVICE, 1)
        accumulated = _integer(train_kwargs, "gradient_accumulation_steps", _ACCUMULATED, 1)
        per_step = per_device * accumulated
        if per_step > MOST_EXAMPLES:
            raise ValueError(
                f"train_kwargs: per_device_train_batch_size × gradient_accumulation_steps is {per_step}; a "
                f"step has at most {MOST_EXAMPLES} examples"
            )
        steps = _integer(train_kwargs, "max_steps", -1, -1)
        if steps < 1:
            epochs = _positive(train_kwargs, "num_train_epochs", _EPOCHS)
            steps = max(1, math.ceil(epochs * math.ceil(examples / per_step)))
        return cls(examples, per_step, steps, _integer(train_kwargs, "seed", 0, None))

    def at(self, step: int) -> list[int]:
        """The examples of step `step`, counted from 0."""
        epoch, within = divmod(step, math.ceil(self.examples / self.per_step))
        order = list(range(self.examples))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order[within * self.per_step : (within + 1) * self.per_step]


def _integer(train_kwargs: Mapping[str, Any], name: str, default: int, minimum: int | None) -> int:
    value = train_kwargs.get(name)
    if value is None:
        return default
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or (minimum is not None and number < minimum):
        bound = f" of at least {minimum}" if minimum is not None else ""
        raise ValueError(f"train_kwargs: {name} must be a whole number{bound}, not {value!r}")
    return number


def _positive(train_kwargs: Mapping[str, Any], name: str, default: float) -> float:
    value = train_kwargs.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"train_kwargs: {name} must be a number above 0, not {value!r}")
    return value
