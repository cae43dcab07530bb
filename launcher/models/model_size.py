"""Estimates the size of a model's weights, for the disk and the GPU memory of a plan.

Neighbours: `pricing.py` asks for a plan, `hub.py` asks the hub. A plan needs no network: the name alone may
tell the size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from launcher.base import embedded_models
from launcher.models import hub

# "Qwen2.5-7B-Instruct" has 7.6 billion parameters: names round down, by a tenth at most.
_ROUNDING_MARGIN = 1.1
_BYTES_PER_PARAMETER = 2
# "8x7B" is seven billion parameters eight times, less those that the experts share.
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.IGNORECASE)


def weights_bytes(model: str, environ: Mapping[str, str], token: str | None = None) -> int | None:
    """Bytes of the weights of `--model MODEL`: by its files here, the hub's list, or its name. None if
    unknown."""
    folder = embedded_models.folder_of(model)
    if folder.is_dir():
        return folder_weights_bytes(folder)
    return hub.weights_bytes(model, environ, token) or bytes_by_name(model)


def bytes_by_name(model: str) -> int | None:
    """The size that a name tells in parameters: "7B" at two bytes each; None if it tells none."""
    found = _SIZE_IN_NAME.findall(model.rpartition("/")[2])
    sizes = [
        int(times or 1) * float(number) * (1e9 if unit in "bB" else 1e6) for times, number, unit in found
    ]
    return round(max(sizes) * _BYTES_PER_PARAMETER * _ROUNDING_MARGIN) if sizes else None


def folder_weights_bytes(folder: Path) -> int | None:
    """The size of the weights in a folder; None if there are none, or no such folder."""
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    return hub.sum_weights(files) or None
