"""A step on the GPU: the same with layers computed twice, its memory at the peak, and how fast it is."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.shared import model_shape
from runtime.shared.memory.memory_item import total
from runtime.shared.memory.trainer import TrainerSetup, items
from runtime.trainer.policy import Policy
from runtime.trainer.update import update
from tests.gpu.training import LORA, long_batch, places, policy_on_gpu
from tests.runtime.trainer_fixtures import ALONE, Measured, assert_same_gradient, measure, settings_of
from tests.support.measured import say

PACK_TOKENS = 4096
SETTINGS = settings_of(pack_tokens=PACK_TOKENS)
# Dense bf16 operations a second, as NVIDIA states them; "H100 NVL" and "PCIe" are slower than what is here.
_PEAK = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "L4": 121e12,
}


def at_peak(policy: Policy, seed: int) -> tuple[Measured, int, int]:
    """A step's gradient; bytes held before it, and at its peak."""
    batch = long_batch(seed)
    measure(policy, batch, SETTINGS)  # what is compiled is compiled here
    for master in policy.master_weights.values():
        master.grad = None
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = measure(policy, batch, SETTINGS)
    return found, held, torch.cuda.max_memory_allocated()


def predicted(model: Path, *, checkpointing: bool) -> int:
    """The planner's word, but for what torch does not count as allocated, and AdamW's moments: none here."""
    shape = model_shape.shape(json.loads((model / "config.json").read_text()))
    assert shape is not None
    training = TrainerSetup(PACK_TOKENS, checkpointing, LORA.rank, shape.lora_names)
    return total(
        line for line in items(shape, training) if line.name not in ("CUDA", "fragmentation", "AdamW")
    )


def test_layers_computed_twice_give_the_same_step_in_the_memory_that_was_planned(
    trained_model: Path, card: dict[str, Any]
) -> None:
    kept, held, kept_peak = at_peak(policy_on_gpu(trained_model), 3)
    again, _, again_peak = at_peak(policy_on_gpu(trained_model, recompute=True), 3)
    assert_same_gradient(again.gradient, kept.gradient, within=1e-3)
    assert abs(again.metrics["loss"] - kept.metrics["loss"]) < 1e-4
    assert again_peak - held < (kept_peak - held) / 2
    said = {
        "predicted_kept": predicted(trained_model, checkpointing=False),
        "predicted_computed_again": predicted(trained_model, checkpointing=True),
    }
    say(
        "step: bytes at the peak",
        model="qwen3-0.6b",
        pack_tokens=PACK_TOKENS,
        held=held,
        kept=kept_peak,
        computed_again=again_peak,
        **said,
        **card,
    )
    assert kept_peak < 1.1 * said["predicted_kept"], "a plan that fits must fit"
    assert again_peak < 1.1 * said["predicted_computed_again"], "a plan that fits must fit"


@pytest.mark.parametrize("pack_tokens", [PACK_TOKENS, 16384])
def test_how_fast_a_step_is(trained_model: Path, card: dict[str, Any], pack_tokens: int) -> None:
    """With `-s` each step is said as it ends. 16,384: what a trainer has on a card of its own.

    MFU: 4 operations a token and weight that multiplies (forward, and backward to the activations: the
    base's own gradients are not computed), attention left out, over what the card is said to do.
    """
    policy = policy_on_gpu(trained_model)
    optimizer = torch.optim.AdamW(list(policy.master_weights.values()), lr=1e-4)
    took = []
    for step in range(7):
        batch = long_batch(step, groups=8)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        update(policy, optimizer, batch, settings_of(pack_tokens=pack_tokens), ALONE)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
        print(f"rows of {pack_tokens}, step {step}: {took[-1]:.2f} s", flush=True)
    tokens = places(batch, pack_tokens)
    a_second = tokens / statistics.median(took[2:])
    weights = sum(weight.numel() for weight in policy.model.parameters() if weight.dim() == 2)
    peak = next((peak for name, peak in _PEAK.items() if name in card["gpu"]), None)
    say(
        "step: speed of the trainer",
        model="qwen3-0.6b",
        pack_tokens=pack_tokens,
        places=tokens,
        first_seconds=round(took[0], 2),
        seconds=round(statistics.median(took[2:]), 3),
        tokens_a_second=round(a_second),
        mfu=None if peak is None else round(4 * weights * a_second / peak, 3),
        **card,
    )
    assert took[0] < 600, "kernels are compiled in this time; the supervisor waits longer"
