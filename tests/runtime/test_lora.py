"""The LoRA beside a linear layer, against torchtune's own: the same sums in fp32, the same bits elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.trainer import network
from runtime.trainer.policy import adapter_off

IN, OUT, RANK = 24, 40, 4


def layer(kind: type[nn.Module], dtype: torch.dtype, bias: bool) -> nn.Module:
    torch.manual_seed(3)
    made = kind(IN, OUT, RANK, float(RANK), use_bias=bias)  # type: ignore[call-arg] - as LoRALinear has them
    for weight in made.parameters():
        weight.requires_grad_(False).normal_()
    for weight in (made.lora_a.weight, made.lora_b.weight):  # type: ignore[union-attr] - of a LoRA
        weight.requires_grad_(True)
    return made.to(dtype)


def found(made: nn.Module, x: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of A, B and what went in."""
    x = x.clone().requires_grad_()
    y = made(x)
    made.zero_grad()
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    grads = [made.lora_a.weight.grad, made.lora_b.weight.grad, x.grad]  # type: ignore[union-attr] - of a LoRA
    return [y.detach(), *(it.clone() for it in grads)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c31_a_lora_that_adds_in_place_is_torchtunes_in_value_and_gradient(
    dtype: torch.dtype, bias: bool
) -> None:
    x = torch.randn(2, 7, IN, generator=torch.Generator().manual_seed(1)).to(dtype)
    own, stock = (found(layer(kind, dtype, bias), x) for kind in (network.LoRA, network.LoRALinear))
    for one, other in zip(own, stock, strict=True):
        if dtype == torch.bfloat16:  # B's product is rounded before it is added, as the engine rounds it
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_c28_where_it_is_off_the_base_alone_is_left() -> None:
    made = layer(network.LoRA, torch.float32, bias=True)
    x = torch.randn(3, IN)
    with adapter_off(made), torch.no_grad():
        assert torch.equal(made(x), nn.functional.linear(x, made.weight, made.bias))  # type: ignore[arg-type]
    assert not torch.equal(made(x), nn.functional.linear(x, made.weight, made.bias))  # type: ignore[arg-type]


def test_no_tokens_at_all_come_out_as_none() -> None:
    """As an expert has them that no token was sent to."""
    made = layer(network.LoRA, torch.float32, bias=True)
    assert made(torch.zeros(0, IN)).shape == (0, OUT)
