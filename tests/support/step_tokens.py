"""The sampled tokens that a step trained, from its tensors on the machine's disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.numpy import load_file


def trained_tokens(machine: Path, rollouts: Iterable[str]) -> list[int]:
    """Those of the one step that was made of exactly these rollouts, in its order."""
    wanted = set(rollouts)
    (step,) = [
        path
        for path in machine.glob("steps/[0-9]*/batch.json")
        if {row.get("rollout") for row in json.loads(path.read_text()).get("samples", ())} == wanted
    ]
    arrays = load_file(step.with_name("batch.safetensors"))
    return arrays["tokens"][arrays["sampled"].astype(bool)].tolist()
