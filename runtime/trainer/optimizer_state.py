"""What besides the adapter a resume needs: the optimizer's moments and the random state, as safetensors.

Neighbours: the recipe, inside `CheckpointStore.commit`. Knows nothing of steps or manifests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"


def save(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Write both files. Moments are named `<tensor>/<moment>`."""
    tensors = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, master in policy.masters.items()
        for key, value in optimizer.state.get(master, {}).items()
    }
    save_file(tensors, folder / _OPTIMIZER)
    save_file({"cpu": torch.get_rng_state()}, folder / _RNG)


def load(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Read both files into a fresh or a used optimizer of the same policy."""
    optimizer.state.clear()
    for key, value in load_file(folder / _OPTIMIZER).items():
        name, _, moment = key.rpartition("/")
        master = policy.masters[name]
        # AdamW keeps its step count on the CPU and its moments beside the tensor.
        optimizer.state[master][moment] = value if moment == "step" else value.to(master.device)
    torch.set_rng_state(load_file(folder / _RNG)["cpu"])
