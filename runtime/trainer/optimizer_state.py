"""The optimizer's moments and the random state as safetensors: a resume needs them beside the adapter.

The learning rate and the like are no part of it: each step sets them again.
Neighbours: the recipe, inside `CheckpointStore.commit`. Knows nothing of steps or manifests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from runtime.shared.projections import PLACES

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

_OPTIMIZER = "optimizer.safetensors"
_RNG = "rng.safetensors"
# The first versions' names of a layer's parts: torchtune's, without the model's own at the front.
_OLD_PREFIXES: dict[str, str] = dict(
    zip(
        ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "mlp.w1", "mlp.w3", "mlp.w2"),
        PLACES,
        strict=True,
    )
)
_OLD_NAME = re.compile(r"(layers\.\d+)\.(\w+\.\w+)(\.lora_[ab]\.weight)")


def save(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Write both files. Moments are named `<tensor>/<moment>`."""
    tensors = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, master in policy.master_weights.items()
        for key, value in optimizer.state.get(master, {}).items()
    }
    save_file(tensors, folder / _OPTIMIZER)
    save_file({"cpu": torch.get_rng_state()}, folder / _RNG)


def load(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Read both files into a fresh or a used optimizer of the same policy."""
    optimizer.state.clear()
    for key, value in load_file(folder / _OPTIMIZER).items():
        name, _, moment = key.rpartition("/")
        master = policy.master_weights[_renamed(name)]
        # AdamW keeps its step count on the CPU and its moments beside the tensor.
        optimizer.state[master][moment] = value if moment == "step" else value.to(master.device)
    torch.set_rng_state(load_file(folder / _RNG)["cpu"])


def _renamed(name: str) -> str:
    """A tensor's name today, also of a run that was begun when Qwen2 and Llama were torchtune's."""
    if old := _OLD_NAME.fullmatch(name):
        return f"model.{old[1]}.{_OLD_PREFIXES[old[2]]}{old[3]}"
    return name
