"""The trainer's processes: one, or several under torchrun that add up their gradients.

Neighbours: the recipe and `update.py`. Knows nothing of batches or models.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)


class RankLostError(Exception):
    """Another process of the trainer is gone or stands still; only it can report the reason."""


class RanksDifferError(Exception):
    """The processes of the trainer hold different weights, so they would train different policies."""


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
    def is_rank_zero(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def all_reduce_sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks. Raises RankLostError, as all below."""
        if self.size > 1:
            for tensor in tensors:
                self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace each entry by its largest over all ranks."""
        if self.size > 1:
            self._all_reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, value: int) -> int:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = torch.tensor([value], device=self.device)
        with _collective():
            dist.broadcast(box, src=0)
        return int(box)

    def any(self, value: bool) -> bool:
        """Whether it is true on some rank."""
        if self.size == 1:
            return value
        box = torch.tensor([int(value)], device=self.device)
        self.all_reduce_max(box)
        return bool(box)

    def check_equal(self, tensors: Iterable[Tensor]) -> None:
        """Raise RanksDifferError, on every rank, unless all hold the same bits (C56)."""
        if self.size == 1:
            return
        hashed = hashlib.sha256()
        for tensor in tensors:
            hashed.update(tensor.detach().cpu().numpy().tobytes())
        own = int.from_bytes(hashed.digest()[:7], "big")
        box = torch.tensor([own, -own], device=self.device)
        self.all_reduce_max(box)
        if int(box[0]) != -int(box[1]):
            raise RanksDifferError("the trainer's processes hold different weights after this step")

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        with _collective():
            dist.all_reduce(tensor, op=operation)

    def leave(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()


def thread_count(given: int | None, device: str) -> int | None:
    """How many threads each process computes with; None leaves torch's own choice.

    More threads than free cores is far worse than fewer: each waits, spinning, for the one that was put off.
    """
    if given is not None:
        return int(given)
    if device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // 2)


@contextmanager
def _collective() -> Iterator[None]:
    """Around a step that all ranks take at once: its error is another rank's, by the wording of gloo and
    nccl."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLostError(str(error)) from error
