"""A checkpoint's manifest: the size and sha256 of every file in the folder, and of the manifest itself.

    {"schema": 1, "step", "version", "created": unix seconds, "adapter_sha256",
     "files": {"state.json": {"sha256", "bytes"}, …}, "sha256": of all the rest}

It is written last, in a canonical form (keys sorted, no blanks), so that no bit of it can change unnoticed.
Neighbours: checkpoint.py, which renames the folder once this is in it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from runtime.shared import failpoints, json_files

SCHEMA = 1
MANIFEST = "manifest.json"
STATE = "state.json"
ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"


class ManifestError(Exception):
    """The folder does not match its manifest, or has none; the text names the file."""


def write(folder: Path, step: int, version: int) -> dict[str, Any]:
    """Describe every file of `folder`, each synced to disk, and add the manifest. Returns its content."""
    described: dict[str, Any] = {}
    for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()):
        described[name] = _describe(folder / name)
        json_files.fsync(folder / name)
        failpoints.failpoint("checkpoint.file")
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "version": version,
        "created": time.time(),
        "files": described,
        "adapter_sha256": described[ADAPTER_WEIGHTS]["sha256"],
    }
    text = render(manifest)
    failpoints.failpoint("checkpoint.described")
    (folder / MANIFEST).write_text(text)
    for path in (folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        json_files.fsync(path)
    return json.loads(text)


def render(manifest: dict[str, Any]) -> str:
    """The canonical text of a manifest with this content, which includes its own hash, over all the rest."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return _compact(rest | {"sha256": hashlib.sha256(_compact(rest).encode()).hexdigest()})


def read(folder: Path, *, verify: bool) -> dict[str, Any]:
    """The folder's manifest. Sizes are always compared, every byte with `verify`. Raises ManifestError."""
    try:
        text = (folder / MANIFEST).read_text()
        manifest = json.loads(text)
        sound = _is_sound(manifest, text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{MANIFEST}: {error}") from error
    if not sound:
        raise ManifestError(f"{MANIFEST}: it was changed after it was written")
    for name, expected in manifest["files"].items():
        _check(folder, name, expected, verify)
    return manifest


def _is_sound(manifest: Any, text: str) -> bool:
    return (
        text == render(manifest)
        and STATE in manifest["files"]
        and manifest["adapter_sha256"] == manifest["files"][ADAPTER_WEIGHTS]["sha256"]
        and all({"sha256", "bytes"} == set(described) for described in manifest["files"].values())
    )


def _check(folder: Path, name: str, expected: dict[str, Any], verify: bool) -> None:
    try:
        right = (folder / name).stat().st_size == expected["bytes"]
        right = right and (not verify or _describe(folder / name) == expected)
    except OSError as error:
        raise ManifestError(f"{name}: {error.strerror}") from error
    if not right:
        raise ManifestError(f"{name}: it does not match the manifest")


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
