"""Checkpoints as the trainer leaves them, for tests of what brings them home; their tensors are noise."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def commit(state_dir: Path, step: int, weights: bytes = b"") -> Path:
    """A whole checkpoint of `step`; `weights` are its adapter's, its client_state is {"done": step}."""
    folder = state_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(weights or os.urandom(3000))
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 16}')
    (folder / "optimizer.safetensors").write_bytes(os.urandom(5000))
    (folder / "state.json").write_text(json.dumps({"step": step, "client_state": {"done": step}}))
    write_manifest(folder, step)
    return folder


def write_manifest(folder: Path, step: int) -> None:
    """A manifest that agrees with the files there are."""
    files = {
        str(path.relative_to(folder)): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    write_said(folder, {"schema": 1, "step": step, "version": step, "created": 0.0, "files": files})


def write_said(folder: Path, said: dict[str, Any]) -> None:
    """A manifest that says this, and is sound in itself."""
    rest = {name: value for name, value in said.items() if name != "sha256"}
    own = hashlib.sha256(_compact(rest).encode()).hexdigest()
    (folder / "manifest.json").write_text(_compact(rest | {"sha256": own}))


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def name_best(state_dir: Path, step: int, of: str) -> None:
    """An optimizer's word that this one is the best of its work."""
    said = {"checkpoint": f"step-{step:06d}", "of": of}
    (state_dir / "checkpoints" / "best.json").write_text(json.dumps(said))


def pin(state_dir: Path, *steps: int) -> None:
    """These are kept for good."""
    names = [f"step-{step:06d}" for step in steps]
    (state_dir / "checkpoints" / "pinned.json").write_text(json.dumps(names))
