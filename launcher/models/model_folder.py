"""Checks that a model's folder can be served and trained, from its small files and its file sizes.

Neighbours: `preflight.py` asks before a run, `doctor.py` for an embedded model. Reads no tensors. Also
computes the size of a run's checkpoints: adapters and the optimizer's moments grow with the model's shape.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError
from runtime.shared.architectures import PolicyError, check_trainable
from runtime.shared.model_shape import ModelShape

_HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own bound on its header
# A committed step holds the adapter and AdamW's two moments in float32.
_BYTES_PER_ADAPTER_WEIGHT = 12


class UnusableModelError(Exception):
    """The reason a folder is not a model that can be served and trained, and the remedy."""

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


def checkpoint_bytes(shape: ModelShape, rank: int, targets: Sequence[str] | None = None) -> int:
    """The size of one committed step with LoRA of this rank on these layers."""
    return shape.adapter_weights(rank, targets) * _BYTES_PER_ADAPTER_WEIGHT


def check(model: str, folder: Path) -> None:
    """The whole folder. Raises PreflightError."""
    try:
        check_config(read_config(folder / "config.json"))
        for name in _weight_files(folder):
            if reason := broken_safetensors(folder / name):
                raise UnusableModelError(f"{folder / name}: {reason}", "copy or download the model again")
        _check_tokenizer(folder)
    except UnusableModelError as unusable:
        raise unusable_model(model, unusable, f"ls -l {folder}") from None


def unusable_model(model: str, unusable: UnusableModelError, hint: str) -> PreflightError:
    """The three lines for a model that cannot be used."""
    return PreflightError(f"the model {model} cannot be used", unusable.why, unusable.hint or hint)


def read_config(path: Path) -> dict[str, Any]:
    """The model's configuration. Raises UnusableModelError."""
    config = _read_object(path)
    if config is None:
        raise UnusableModelError(f"no config.json in {path.parent}")
    return config


def check_config(config: dict[str, Any]) -> None:
    """Raises UnusableModelError if the model cannot be trained here."""
    try:
        check_trainable(config)
    except PolicyError as error:
        raise UnusableModelError(
            str(error), "launch --model Qwen/Qwen3-1.7B  # a causal language model"
        ) from None


def _check_tokenizer(folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    found = next((name for name in names if (folder / name).exists()), None)
    if found is None:
        raise UnusableModelError(f"no tokenizer in {folder}")
    if found.endswith(".json"):
        _read_object(folder / found)
    if not _has_chat_template(folder):
        raise UnusableModelError(
            "its tokenizer has no chat template",
            "take an instruct model, which has one: launch --model MODEL",
        )


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None when the file is not there. Raises UnusableModelError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UnusableModelError(f"{path} is damaged: {error}", "copy or download the model again") from None
    except OSError as error:
        raise UnusableModelError(f"{path}: {error.strerror}") from None
    if not isinstance(found, dict):
        raise UnusableModelError(
            f"{path} is damaged: it is not a JSON object", "copy or download the model again"
        )
    return found


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    described = _read_object(index)
    if described is not None:
        weight_map = described.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnusableModelError(f"{index} is damaged: no weight_map", "copy or download the model again")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise UnusableModelError(f"{index} names files outside its folder")
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise UnusableModelError(f"no *.safetensors in {folder}; other weight formats are not supported")
    return names


def safetensors_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a file that is not broken, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def broken_safetensors(path: Path) -> str | None:
    """The reason the file is damaged, from its header alone; None when its lengths agree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
            if length > min(_HEADER_LIMIT, size):
                return "not a safetensors file, or cut short"
            header = json.loads(file.read(length))
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            ends = [entry["data_offsets"][1] for entry in entries]
            if not all(isinstance(entry["shape"], list) for entry in entries):
                return "its header is damaged"
    except FileNotFoundError:
        return "listed in the index, but missing"
    except OSError as error:
        return error.strerror
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its header is damaged"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"cut short: {size} bytes of {whole}"


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    described = _read_object(folder / "tokenizer_config.json") or {}
    return bool(described.get("chat_template"))
