"""Norms by vLLM's own CPU kernels: one call in place of some eight of torch's.

vLLM leaves them out on a CPU, where its compiler should fuse the eight; but with LoRA it compiles nothing.
Only in fp32, where both ways agree to a last bit or two: in bf16 the kernel rounds once where a model's own
norm rounds twice, and the trainer is the model's own.
Neighbours: worker.py imports this in every process of the engine, command.py names the provider to vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

from runtime.engine.command import NORMS_PROVIDER

# The kernels read so many numbers at a time, and refuse a row that is no multiple of it.
_ROWS_PER_THREAD = 16


def _fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    """Whether the kernels compute the same: they assume contiguous rows without a check."""
    return (
        x.dtype == torch.float32
        and weight is not None
        and weight.dtype == x.dtype
        and variance_size is None
        and x.shape[-1] % _ROWS_PER_THREAD == 0
        and x.is_contiguous()
    )


def _rms_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _fits(x, weight, variance_size)


def _add_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, variance_size) and x_residual.dtype == x.dtype and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl(NORMS_PROVIDER, supports_args=_rms_fits)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """The norm of each row."""
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(NORMS_PROVIDER, supports_args=_add_fits, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of each row's sum, and the sum: both are written over the inputs."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
