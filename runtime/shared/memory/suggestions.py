"""Suggestions for a model that does not fit: other GPUs, or settings to drop.

Neighbours: the launcher puts it into the refusal; `planning.py` weighs each. Knows no prices. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from runtime.shared import gpu_memory
from runtime.shared.memory.planning import MachineGpus, MemoryPlan, Overrides, plan
from runtime.shared.model_shape import ModelShape

# Kinds that clouds rent and people ask for, the smallest first.
_KINDS = ("L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200", "B300")
# The factor from which memory counts as larger: two GPUs of 80 GB are alike.
_LARGER = 1.1
# A memory override, by the key that it is set with.
KEYS = {
    "checkpointing": "train.activation_checkpointing",
    "pack_tokens": "train.pack_tokens",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "memory_fraction": "engine.memory_fraction",
    "kv_cache_gib": "engine.kv_cache_gib",
}


def plan_with_suggestions(shape: ModelShape, split: MachineGpus, overrides: Overrides) -> MemoryPlan | None:
    """The plan; if it does not fit, with suggestions. None for an unknown GPU."""
    weighed = plan(shape, split, overrides)
    if weighed is None or weighed.fits:
        return weighed
    in_the_way = blocking_overrides(shape, split, overrides)
    others = [] if in_the_way else fitting_gpus(shape, split, overrides)
    return replace(weighed, instead=tuple(others), in_the_way=tuple(in_the_way))


def fitting_gpus(shape: ModelShape, split: MachineGpus, overrides: Overrides, most: int = 2) -> list[str]:
    """Such as ["H100:2", "B200:1"]: of the same kind first, then of larger ones, fewest first."""
    found = []
    for kind, count in _other_gpus(split):
        if len(found) == most:
            break
        if any(one.startswith(f"{kind}:") for one in found):
            continue
        other = MachineGpus(kind, count, 1, max(1, count - 1))
        weighed = plan(shape, other, overrides)
        if weighed is not None and weighed.fits:
            found.append(f"{kind}:{count}")
    return found


def _other_gpus(split: MachineGpus) -> Iterator[tuple[str, int]]:
    own = split.listed_bytes or gpu_memory.memory_bytes(split.gpu) or 0
    if split.shared:
        yield split.gpu, 2
    for kind in _KINDS:
        if (gpu_memory.memory_bytes(kind) or 0) > own * _LARGER:
            yield from ((kind, count) for count in (1, 2) if count >= min(split.count, 2) or split.shared)


def blocking_overrides(shape: ModelShape, split: MachineGpus, overrides: Overrides) -> list[str]:
    """The user's settings without which it would fit; [] if dropping them would not help."""
    none: dict[str, Any] = {field.name: field.default for field in fields(Overrides)}
    user_set = [name for name in KEYS if getattr(overrides, name) is not None]
    for name in user_set:
        weighed = plan(shape, split, replace(overrides, **{name: none[name]}))
        if weighed is not None and weighed.fits:
            return [KEYS[name]]
    weighed = plan(shape, split, replace(overrides, **{name: none[name] for name in user_set}))
    return [KEYS[name] for name in user_set] if user_set and weighed is not None and weighed.fits else []
