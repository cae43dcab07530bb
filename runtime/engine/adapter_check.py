"""Compares the LoRA tensors an engine multiplies with against the adapter file, without vLLM's loader.

Neighbours: worker.py reads the engine's buffers and calls `compare`; version_check.py judges the report.
Knows torch and safetensors; nothing of vLLM, versions or HTTP.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from runtime.shared.projections import GATE_UP, QKV

WEIGHTS = "adapter_model.safetensors"
# How engines fuse projections: the fused module's name, and its slices in order.
FUSED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# The values that adapter_config.json must have, for A and B alone to be the whole adapter (C14, C27).
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
}


@dataclass(frozen=True)
class Pair:
    """A [rank, in] and B [out, rank] of one projection; in an engine's buffers padded with zeros."""

    a: torch.Tensor
    b: torch.Tensor


def compare(
    loaded: Mapping[str, Sequence[Pair]], folder: Path, renamed: Callable[[str], str] = str
) -> dict[str, Any]:
    """The report of one engine. `loaded`: its modules by name, with one Pair per fused slice. `renamed` maps
    the model files' names to the engine's.

    `modules` counts the slices that hold anything, `expected` the projections in the file, `mismatched` has a
    sentence for each difference; alpha / rank (or / √rank) is folded into B on the engine's side.
    """
    content = (folder / WEIGHTS).read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    pairs, mismatches = _read(load(content), renamed)
    mismatches += [
        f"adapter_config.json: {key} = {config[key]!r}" for key in _PLAIN if not _plain(config, key)
    ]
    engine = dict(_slices(loaded, pairs))
    mismatches += [f"{module}: the engine has no such module" for module in pairs if module not in engine]
    for module, slot in engine.items():
        mismatches += _differences(module, slot, pairs.get(module), _scale(config))
    return {
        "modules": sum(bool(slot.a.any()) for slot in engine.values()),
        "expected": len(pairs),
        "mismatched": mismatches,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _read(
    tensors: Mapping[str, torch.Tensor], renamed: Callable[[str], str]
) -> tuple[dict[str, Pair], list[str]]:
    """Pairs by the engine's name of their module, and a sentence for each tensor that is no half of one."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    mismatches = []
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        if bare != name and (match := _TENSOR.fullmatch(renamed(bare))):
            sides.setdefault(match["module"], {})[match["side"]] = tensor
        else:
            mismatches.append(f"{name}: not a LoRA matrix of a linear layer")
    mismatches += [
        f"{module}: only one of A and B is in the file" for module in sides if len(sides[module]) != 2
    ]
    return {
        module: Pair(a=both["A"], b=both["B"]) for module, both in sides.items() if len(both) == 2
    }, mismatches


def _slices(held: Mapping[str, Sequence[Pair]], pairs: Mapping[str, Pair]) -> list[tuple[str, Pair]]:
    """Each slice of the engine's modules under the name its projection has in the file.

    A file may have projections fused as the engine has (Phi-3's): then their slices are one.
    """
    named = []
    for module, slots in held.items():
        parent, _, last = module.rpartition(".")
        if module in pairs and _share_a(slots):
            named.append((module, Pair(slots[0].a, torch.cat([slot.b for slot in slots]))))
            continue
        parts = FUSED.get(last, (last,)) if len(slots) > 1 else (last,)
        if len(parts) != len(slots):
            parts = tuple(f"{last}[{index}]" for index in range(len(slots)))
        prefix = f"{parent}." if parent else ""
        named += [(prefix + part, slot) for part, slot in zip(parts, slots, strict=True)]
    return named


def _share_a(slots: Sequence[Pair]) -> bool:
    return all(torch.equal(slot.a, slots[0].a) for slot in slots[1:])


def _differences(module: str, slot: Pair, wanted: Pair | None, scale: float) -> list[str]:
    """How the engine's slot differs from the file's pair; without one the slot must be empty."""
    if wanted is None:
        return (
            [f"{module}: not in the file, yet the engine holds it"] if slot.a.any() and slot.b.any() else []
        )
    mismatches = []
    for side, have, want in (("A", slot.a, wanted.a), ("B", slot.b, wanted.b)):
        if not want.isfinite().all():
            mismatches.append(f"{module}.lora_{side}: the file holds a number that is not finite")
            continue
        expected = want.to(have.dtype)
        if side == "B" and scale != 1:
            expected = expected * scale  # in the engine's own precision, as it does
        if not _equal_padded(have, expected.to(have.device)):
            mismatches.append(f"{module}.lora_{side}: the engine's differs from the file's")
    return mismatches


def _equal_padded(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether `have` is `want`, bit for bit, and zero beyond it."""
    rows, columns = want.shape
    if rows > have.shape[0] or columns > have.shape[1]:
        return False
    rest = (have[rows:], have[:, columns:])
    return torch.equal(have[:rows, :columns], want) and not any(part.any() for part in rest)


def _scale(config: Mapping[str, Any]) -> float:
    rank = config["r"]
    return config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)


def _plain(config: Mapping[str, Any], key: str) -> bool:
    return config.get(key) in _PLAIN[key]
