"""Linear attention of one prompt token on a CPU, where vLLM 0.32's kernel refuses it and the engine dies.

A prompt of one token, or one of which all but the last is in the prefix cache, is a row that looks transposed
to no stride check: its tokens' stride is that of the projection it was cut from. A copy has its own.
Neighbours: worker.py installs it in every process of the engine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import _custom_ops

_kernel = _custom_ops.causal_conv1d_fwd_cpu


def install() -> None:
    """In this process; again changes nothing."""
    _custom_ops.causal_conv1d_fwd_cpu = _causal_conv1d_fwd_cpu


def _causal_conv1d_fwd_cpu(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
    return _kernel(_of_own_strides(x) if x.shape[-1] == 1 else x, *arguments, **named)


def _of_own_strides(x_DT: Tensor) -> Tensor:
    """The same numbers, laid down token by token."""
    return x_DT.new_empty(x_DT.shape[::-1]).copy_(x_DT.T).T
