"""A policy on the GPU with an adapter that does something, and batches as long as those that are trained."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from runtime.shared.batch import Batch
from runtime.trainer import policy as policies
from runtime.trainer.forward import sequences
from runtime.trainer.packing import pack
from runtime.trainer.policy import Lora, Policy
from tests.runtime.trainer_fixtures import make_batch, random_samples

# A word of Qwen3's vocabulary, all of them alike.
_OF_NO_TRAINING = -math.log(151936)
LORA = Lora(rank=16, alpha=32.0)


def policy_on_gpu(model: Path, *, recompute: bool = False) -> Policy:
    """In bf16, as a run on a GPU has it."""
    policy = policies.build(model, LORA, dtype="bfloat16", device="cuda", seed=0, recompute=recompute)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, master in policy.master_weights.items():
            if ".lora_b." in name:
                master.copy_(torch.randn(master.shape, generator=generator) * 0.01)
    policy.refresh_working_copy()
    return policy


def long_batch(
    seed: int, *, groups: int = 2, members: int = 8, prompt: int = 512, answer: int = 384
) -> Batch:
    """Groups whose members share a prompt; one turn each, and as likely as a model without training has them:
    else who sampled and who trains differ so much that nothing of a sample counts."""
    samples = random_samples(seed, groups=groups, members=members, prompt=prompt, completion=answer)
    return make_batch([replace(sample, logprob=_OF_NO_TRAINING) for sample in samples])


def places(batch: Batch, pack_tokens: int) -> int:
    """Tokens that a step on this batch computes: shared prompts once, padding left out."""
    packs = pack(sequences(batch), range(batch.sequences), pack_tokens, fixed_rows=True)
    return sum(int((one.tree_BL >= 0).sum()) for one in packs)
