"""Norms by vLLM's own CPU kernels against its plain ones (runtime/engine/norms.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vLLM

WIDE = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
ROWS: dict[str, torch.Tensor] = {
    "whole rows": WIDE.clone(),
    "heads": WIDE.clone().view(7, 3, 32),
    "a part of wider rows": WIDE[:, :64],
    "a width that the kernels refuse": WIDE[:, :24].contiguous(),
    "bf16": WIDE.to(torch.bfloat16),
}
FAST = ("whole rows", "heads")


def ops() -> Any:
    from vllm import ir
    from vllm.platforms import current_platform

    import runtime.engine.norms  # noqa: F401 - registers the kernels

    current_platform.import_kernels()  # as an engine's worker does
    return ir.ops


def of(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, what is added to them, and weights, in that form."""
    generator = torch.Generator().manual_seed(1)
    added = torch.randn(row.shape, generator=generator).to(row.dtype)
    return row, added, torch.randn(row.shape[-1], generator=generator).to(row.dtype)


@pytest.mark.parametrize("form", ROWS)
def test_norms_are_those_that_vllm_has_without_the_kernels(form: str) -> None:
    from runtime.engine.command import NORMS_PROVIDER

    norm = ops().rms_norm
    row, _, weight = of(ROWS[form])
    norm.set_default([NORMS_PROVIDER, "native"])
    plain = norm.impls["native"].impl_fn(row, weight, 1e-6)
    torch.testing.assert_close(norm(row, weight, 1e-6), plain, rtol=2e-6, atol=2e-6)
    assert norm.dispatch(row, weight, 1e-6).provider == (NORMS_PROVIDER if form in FAST else "native")


@pytest.mark.parametrize("form", ROWS)
def test_norms_of_sums_are_those_that_vllm_has_without_the_kernels(form: str) -> None:
    from runtime.engine.command import NORMS_PROVIDER

    norm = ops().fused_add_rms_norm
    row, added, weight = of(ROWS[form])
    norm.set_default([NORMS_PROVIDER, "native"])
    plain, total = norm.impls["native"].impl_fn(row, added, weight, 1e-6)
    found, found_total = norm.maybe_inplace(row.clone(), added.clone(), weight, 1e-6)
    torch.testing.assert_close(found, plain, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found_total, total, rtol=0, atol=0)


@pytest.mark.parametrize("variance_size", [None, 16])
def test_norms_without_weights_or_by_a_part_of_their_rows_are_vllms_own(variance_size: int | None) -> None:
    from runtime.engine.command import NORMS_PROVIDER

    norm = ops().rms_norm
    norm.set_default([NORMS_PROVIDER, "native"])
    row, _, weight = of(ROWS["whole rows"])
    asked = (row, weight if variance_size else None, 1e-6, variance_size)
    assert norm.dispatch(*asked).provider == "native"
