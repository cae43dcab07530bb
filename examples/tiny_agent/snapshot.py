"""The state of a training in one safetensors file, so that two hours need not be one sitting.

Neighbours: `make.py` writes one every few minutes and goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

_WEIGHT = "weight"


def save(file: Path, model: torch.nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
    """The weights and what the optimizers remember after so many steps."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        tensors[f"{_WEIGHT}/{name}"] = weight.detach()
        (state,) = (it.state[weight] for it in optimizers if weight in it.state)
        tensors |= {f"{key}/{name}": value for key, value in state.items()}
    part = file.with_suffix(".part")
    save_file(tensors, part, {"step": str(step)})
    part.replace(file)


def load(file: Path, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """The number of steps that it was saved after. Raises KeyError for another model's."""
    weights = dict(model.named_parameters())
    with safe_open(file, framework="pt") as saved:
        for key in saved.keys():  # noqa: SIM118 - it cannot be iterated
            part, _, name = key.partition("/")
            weight, value = weights[name], saved.get_tensor(key)
            if part == _WEIGHT:
                weight.data.copy_(value)
                continue
            (owner,) = (it for it in optimizers if any(weight is some for some in _weights_of(it)))
            owner.state[weight][part] = value
        return int(saved.metadata()["step"])


def _weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [it for group in optimizer.param_groups for it in group["params"]]
