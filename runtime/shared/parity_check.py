"""A model's admission on disk: the trainer's parity check, and its result (C58).

    STATE/admission/        the parity check's files: adapter/ (PEFT form), probe.safetensors, state.json,
                            manifest.json; until the model is admitted
    STATE/admission.json    {"admitted", "model", "subject", "time", numbers; "reason" if it was refused}

Whole or absent, as a checkpoint is. Neighbours: trainer/parity_export.py writes the folder,
gateway/versions/model_check.py checks it and writes the file; both know by `subject` whether an earlier
process has passed. Knows nothing of tensors or of the judgement. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from runtime.shared import failpoints, json_files
from runtime.shared import manifest as manifests
from runtime.shared.checkpoint import Checkpoint
from runtime.shared.manifest import STATE, ManifestError
from runtime.shared.runtime_config import RuntimeConfig

FOLDER = "admission"
RECORD = "admission.json"
# Packages whose other versions may compute differently.
_PACKAGES = ("vllm", "torch", "transformers")


def fingerprint(config: RuntimeConfig) -> str:
    """A short digest of the admitted combination: this model, with such adapters, computed by these
    programs."""
    combination = {
        "model": config.model_path,
        "files": _files(Path(config.model_path)),
        "device": config.device,
        "dtype": config.dtype,
        "lora": config.train.lora.model_dump(mode="json"),
        "programs": [_version(name) for name in _PACKAGES],
    }
    return hashlib.sha256(json.dumps(combination, sort_keys=True).encode()).hexdigest()[:16]


def is_admitted(state_dir: Path, subject: str) -> bool:
    """Whether an earlier process has seen engine and trainer agree on this."""
    try:
        record = json_files.read_json(state_dir / RECORD) or {}
    except ValueError:
        return False
    return record.get("admitted") is True and record.get("subject") == subject


def export(state_dir: Path, subject: str, write: Callable[[Path], None]) -> None:
    """Put a trial in its place, by one rename; `write` fills its folder."""
    folder, partial = state_dir / FOLDER, state_dir / f".tmp-{FOLDER}"
    for old in (partial, folder):  # of a process that was killed, or of another subject
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / STATE).write_text(json.dumps({"subject": subject}))
    manifests.write(partial, step=0, version=0)
    failpoints.failpoint("admission.written")
    os.rename(partial, folder)
    json_files.fsync(state_dir)


def find(state_dir: Path, subject: str) -> Checkpoint | None:
    """The trial, every byte of it as it was written; None until there is one of this subject."""
    folder = state_dir / FOLDER
    try:
        manifest = manifests.read(folder, verify=True)
        state = json.loads((folder / STATE).read_text())
    except (ManifestError, OSError, ValueError):
        return None
    return Checkpoint(folder, manifest, state) if state.get("subject") == subject else None


def remove(state_dir: Path) -> None:
    """The trial has done its work; its adapter may be large."""
    shutil.rmtree(state_dir / FOLDER, ignore_errors=True)


def _files(model: Path) -> list[tuple[str, int]]:
    """A model folder's files, by name and size; empty for a hub's name."""
    found = [*model.glob("*.safetensors"), *model.glob("config.json")]
    return sorted((file.name, file.stat().st_size) for file in found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
