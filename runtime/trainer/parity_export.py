"""The files of a model's parity check (C58): a random adapter, and the trainer's logprobs with it.

Neighbours: the recipe writes them before its first step; shared/parity_check.py has the place; the gateway
has every engine score the same and compares (gateway/engines/parity_check.py). Knows nothing of engines.

The adapter goes the way of every step's: it is put into the fp32 masters, the working copy multiplies with
it, the export writes it. Afterwards every bit of the policy is as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.shared import parity_check as on_disk
from runtime.shared.architectures import positions
from runtime.shared.language_model import language_model
from runtime.shared.probe_file import PROBE_FILE
from runtime.trainer.forward import next_logits, sequence_logprobs
from runtime.trainer.packing_check import check_packing

if TYPE_CHECKING:
    from runtime.trainer.policy import Policy

_SEED = 58
# Tokens of a prompt, and those after it that are compared.
_SHORT_PROMPT = 16
_LONG_PROMPT = 144  # of several blocks of an engine's prefix cache
_COMPLETION_TOKENS = 24
# A prompt reaches so far past a sliding window, where there is one and it is no longer than this.
_PAST_WINDOW = 40
_MAX_WINDOW = 4096
# How far the adapter moves logprobs, root mean square: so much of their spread, and at most so much. Enough
# to stand out of bf16's rounding, and not so much that another model comes out.
_EFFECT_SHARE = 0.5
_MAX_EFFECT = 1.0
_INITIAL_SCALE = 0.02
_MAX_SCALES = 10


def export_parity_check(policy: Policy, state_dir: Path, subject: str, model: Path, base_model: str) -> None:
    """Leave the gateway a trial, unless engine and trainer were seen to agree on this before."""
    if not on_disk.is_admitted(state_dir, subject):
        on_disk.export(
            state_dir, subject, lambda folder: write_parity_check(policy, folder, model, base_model)
        )


def write_parity_check(policy: Policy, folder: Path, model: Path, base_model: str) -> None:
    """Fill a folder with the adapter and its probe. `model`: the folder of the base.

    Raises PolicyError for a model that cannot be trained in packed rows.
    """
    sequences = _sequences(policy, language_model(json.loads((model / "config.json").read_text())))
    with policy.reference():
        check_packing(policy, sequences, _COMPLETION_TOKENS)
    with policy.reference():
        base_logprobs = _logprobs(policy, sequences)
    with torch.no_grad(), _random_adapter(policy) as directions:
        _scale_to_effect(
            policy, directions, sequences[0], torch.cat([row[-_COMPLETION_TOKENS:] for row in base_logprobs])
        )
        policy.export_adapter(folder / "adapter", base_model)
        adapter_logprobs = _logprobs(policy, sequences)
    save_file(_probe(sequences, adapter_logprobs, base_logprobs), folder / PROBE_FILE)


# ------------------------------------------------------------------ the sequences


def _sequences(policy: Policy, config: Mapping[str, Any]) -> list[Tensor]:
    """Two sequences: a random prompt each, and the base's own answer at temperature 1, always the same.

    Training uses the model's own answers. Tokens that it would never sample have large logprobs, and so a
    large bf16 error.
    """
    generator = torch.Generator().manual_seed(_SEED)
    words = torch.tensor(_ordinary_tokens(config, policy.vocab_size))
    found = []
    for length in _prompt_lengths(config):
        prompt = words[torch.randint(len(words), (length,), generator=generator)]
        found.append(_sample_completion(policy, prompt, generator))
    return found


def _ordinary_tokens(config: Mapping[str, Any], size: int) -> list[int]:
    """Ids out of the middle of a vocabulary, where every tokenizer has words and none of its marks."""
    marks: set[Any] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_ids = config.get(name)
        marks |= set(token_ids) if isinstance(token_ids, list) else {token_ids}
    return [token for token in range(size // 8, size // 2) if token not in marks]


def _prompt_lengths(config: Mapping[str, Any]) -> list[int]:
    """The prompts' lengths. The longer one reaches past a sliding window; both fit into the context."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    long = _LONG_PROMPT
    if window and window <= _MAX_WINDOW:
        long = max(long, int(window) + _PAST_WINDOW)
    most = positions(config) or long + _COMPLETION_TOKENS + 1
    return [_SHORT_PROMPT, min(long, most - _COMPLETION_TOKENS - 1)]


@torch.no_grad()
def _sample_completion(policy: Policy, prompt: Tensor, generator: torch.Generator) -> Tensor:
    """The prompt, and tokens that the base samples after it."""
    ids = prompt
    with policy.reference():
        for _ in range(_COMPLETION_TOKENS):
            chances = next_logits(policy, ids).float().softmax(-1).cpu()
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)])
    return ids


# ------------------------------------------------------------------ the adapter


@contextmanager
def _random_adapter(policy: Policy) -> Iterator[dict[str, Tensor]]:
    """Inside, the masters are a random A and no B; yields random directions for each B."""
    own = {name: master.detach().clone() for name, master in policy.master_weights.items()}
    try:
        directions = {}
        for name, master in policy.master_weights.items():
            drawn = _random_like(name, master)
            if "lora_b" in name.lower():
                directions[name] = drawn
            else:
                master.copy_(drawn / master.shape[1] ** 0.5)
        yield directions
    finally:
        for name, value in own.items():
            policy.master_weights[name].copy_(value)
        policy.refresh_working_copy()


def _random_like(name: str, like: Tensor) -> Tensor:
    """Random by the name alone, on any device and in any order."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(like.device)


def _scale_to_effect(policy: Policy, directions: Mapping[str, Tensor], tokens: Tensor, base: Tensor) -> None:
    """Make each B so large that the adapter moves logprobs as far as it should.

    How far that is depends on the model's own weights, so it is tried. `base`: of all that counts.
    """
    target = min(_MAX_EFFECT, _EFFECT_SHARE * float(base.std()))
    size = _INITIAL_SCALE
    for _ in range(_MAX_SCALES):
        for name, direction in directions.items():
            policy.master_weights[name].copy_(direction * size)
        policy.refresh_working_copy()
        adapter_logprobs = sequence_logprobs(policy, tokens)[-_COMPLETION_TOKENS:]
        effect = float((adapter_logprobs - base[:_COMPLETION_TOKENS]).square().mean().sqrt())
        if target / 1.5 <= effect <= target * 1.5:
            return
        size *= min(8.0, max(0.125, target / max(effect, 1e-9)))


# ------------------------------------------------------------------ the probe


@torch.no_grad()
def _logprobs(policy: Policy, sequences: list[Tensor]) -> list[Tensor]:
    return [sequence_logprobs(policy, ids) for ids in sequences]


def _probe(
    sequences: list[Tensor], adapter_logprobs: list[Tensor], base_logprobs: list[Tensor]
) -> dict[str, Tensor]:
    """The format of shared/probe_file.py; only sampled tokens count."""
    sampled = [torch.arange(len(ids)) >= len(ids) - _COMPLETION_TOKENS for ids in sequences]
    return {
        "tokens": torch.cat(sequences),
        "sampled": torch.cat(sampled).to(torch.uint8),
        "offsets": torch.tensor([0, *(len(ids) for ids in sequences)]).cumsum(0),
        "logprobs_policy": torch.cat(adapter_logprobs),
        "logprobs_base": torch.cat(base_logprobs),
    }
