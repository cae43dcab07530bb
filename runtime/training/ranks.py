"""The trainer's processes: one, or several under torchrun that add up their gradients.

Neighbours: the recipe and `update.py`. Knows nothing of batches or models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size`; with one process nothing is ever sent."""

    rank: int
    size: int
    device: str

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Join the group torchrun set up in the environment; `device` is cpu (gloo) or cuda (nccl)."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, device)
        local = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
        if device == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
        return cls(dist.get_rank(), size, local)

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = torch.tensor([value], device=self.device)
        dist.broadcast(box, src=0)
        return int(box)

    def any(self, value: bool) -> bool:
        """Whether it is true on some rank."""
        if self.size == 1:
            return value
        box = torch.tensor([int(value)], device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return bool(box)

    def leave(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()
