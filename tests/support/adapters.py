"""An adapter's folder on the embedded model, as the trainer leaves one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launcher.base.embedded_models import folder_of
from launcher.models.model_folder import read_config
from runtime.shared.model_shape import shape
from runtime.shared.peft_format import tensor_shapes
from runtime.shared.projections import PROJECTIONS


def write(folder: Path, rank: int = 16, **changes: Any) -> Path:
    """An adapter on the embedded model as the trainer writes it; its tensors are zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "peft_type": "LORA", "base_model_name_or_path": "tiny", "r": rank, "lora_alpha": 16.0,
        "lora_dropout": 0.0, "target_modules": sorted(PROJECTIONS), "bias": "none", "use_dora": False,
    } | changes  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))
    of = shape(read_config(folder_of("tiny") / "config.json"))
    assert of is not None
    targets = said["target_modules"]
    header, size = dict[str, Any](), 0
    for name, sides in tensor_shapes(of, rank, targets if isinstance(targets, list) else None).items():
        length = 4 * sides[0] * sides[1]
        header[name] = {"dtype": "F32", "shape": sides, "data_offsets": [size, size + length]}
        size += length
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return folder
