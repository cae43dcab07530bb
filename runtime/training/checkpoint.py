"""Checkpoints: whole or absent. The rename of a folder with its manifest in it *is* the commit of a step.

Neighbours: the recipe commits, the gateway lists, publishes and pins. numpy and safetensors only.
Knows nothing of what the tensors mean, nor of models, torch or serving.

    checkpoints/step-000007/
        adapter/adapter_model.safetensors  adapter/adapter_config.json     PEFT form
        optimizer.safetensors  rng.safetensors  probe.safetensors         what a resume and a proof need
        state.json                                                         step, key, counters, client_state
        manifest.json                                                      sha256 and size of every file above
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.schema import CheckpointInfo

SCHEMA = 1
MANIFEST = "manifest.json"
STATE = "state.json"
ADAPTER = "adapter"
ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"
_PINNED = "pinned.json"
_log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint is missing or not whole; the text says which file."""


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]
    state: dict[str, Any]

    @property
    def name(self) -> str:
        """`step-000007`."""
        return self.folder.name

    @property
    def step(self) -> int:
        """The step it committed."""
        return int(self.manifest["step"])

    @property
    def version(self) -> int:
        """The policy version it holds."""
        return int(self.manifest["version"])

    @property
    def adapter(self) -> Path:
        """The folder in PEFT form."""
        return self.folder / ADAPTER

    @property
    def adapter_sha256(self) -> str:
        """Hash of the adapter's weights file."""
        return str(self.manifest["adapter_sha256"])


def checkpoint_name(step: int) -> str:
    """The folder's name for a step."""
    return f"step-{step:06d}"


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def commit(
        self, step: int, version: int, state: dict[str, Any], write: Callable[[Path], None]
    ) -> Checkpoint:
        """Commit a step: `write` fills a temporary folder, then hash, fsync and one rename.

        A kill at any instant leaves either no such checkpoint or the whole of it. Raises FileExistsError when
        the step is committed already: a step happens once. One that is there but not whole is replaced.
        """
        folder = self.root / checkpoint_name(step)
        if self._is_whole(folder.name):
            raise FileExistsError(f"{folder.name} is committed already")
        self._clear_partials()
        self._remove(folder.name)  # a broken one, which `newest` passed over: the step is taken again
        partial = self.root / f".tmp-{folder.name}-{os.getpid()}"
        partial.mkdir(parents=True)
        write(partial)
        (partial / STATE).write_text(json.dumps(state))
        files = {name: _describe(partial / name) for name in sorted(_files(partial))}
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "version": version,
            "created": time.time(),
            "files": files,
            "adapter_sha256": files[ADAPTER_WEIGHTS]["sha256"],
        }
        (partial / MANIFEST).write_text(json.dumps(manifest))
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        os.rename(partial, folder)
        _sync(self.root)
        return Checkpoint(folder, manifest, state)

    def load(self, name: str, *, verify: bool = True) -> Checkpoint:
        """The checkpoint of that name; `verify` reads every byte. Raises CheckpointError if not whole."""
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{name!r} is no checkpoint's name")
        folder = self.root / name
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            state = json.loads((folder / STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error
        _check_manifest(name, manifest)
        if verify:
            for file, expected in manifest["files"].items():
                _check(folder / file, expected)
        return Checkpoint(folder, manifest, state)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; a broken one is passed over and said in the log."""
        for name in reversed(self.names()):
            try:
                return self.load(name)
            except CheckpointError as error:
                _log.warning("passed over a checkpoint that is not whole: %s", error)
        return None

    def names(self) -> list[str]:
        """Names of the committed checkpoints, oldest first."""
        return sorted(path.name for path in self.root.glob("step-*")) if self.root.is_dir() else []

    def list(self) -> list[CheckpointInfo]:
        """What is kept, oldest first; sizes from the manifests, nothing is read in full."""
        pinned = self.pinned()
        return [_info(checkpoint, checkpoint.name in pinned) for checkpoint in self._readable()]

    def pinned(self) -> set[str]:
        """Names that `prune` never removes."""
        try:
            return set(json.loads((self.root / _PINNED).read_text()))
        except FileNotFoundError:
            return set()

    def pin(self, name: str) -> CheckpointInfo:
        """Keep a checkpoint for good. Raises CheckpointError when it is not there or not whole."""
        checkpoint = self.load(name)
        partial = self.root / f".{_PINNED}.{os.getpid()}"
        partial.write_text(json.dumps(sorted(self.pinned() | {name})))
        _sync(partial)
        os.replace(partial, self.root / _PINNED)
        _sync(self.root)
        return _info(checkpoint, pinned=True)

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` (2 at least) and the pinned ones; the names removed."""
        pinned = self.pinned()
        removed = [name for name in self.names()[: -max(2, keep)] if name not in pinned]
        for name in removed:
            self._remove(name)
        return removed

    def _is_whole(self, name: str) -> bool:
        try:
            self.load(name)
        except CheckpointError:
            return False
        return True

    def _remove(self, name: str) -> None:
        """Renamed first: a half-removed folder must not look like a checkpoint."""
        if (self.root / name).exists():
            doomed = self.root / f".tmp-removed-{name}"
            os.rename(self.root / name, doomed)
            shutil.rmtree(doomed)

    def _readable(self) -> Iterator[Checkpoint]:
        for name in self.names():
            try:
                yield self.load(name, verify=False)
            except CheckpointError as error:
                _log.warning("passed over a checkpoint that cannot be read: %s", error)

    def _clear_partials(self) -> None:
        """What a killed commit left; there is one writer, so nothing here is in use."""
        for path in self.root.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)


def _info(checkpoint: Checkpoint, pinned: bool) -> CheckpointInfo:
    return CheckpointInfo(
        name=checkpoint.name,
        step=checkpoint.step,
        version=checkpoint.version,
        created=checkpoint.manifest["created"],
        bytes=sum(file["bytes"] for file in checkpoint.manifest["files"].values()),
        pinned=pinned,
        client_state=checkpoint.state.get("client_state"),
        metrics=checkpoint.state.get("metrics", {}),
    )


def _files(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _describe(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _check_manifest(name: str, manifest: Any) -> None:
    """A manifest has no hash of its own; what it says must at least agree with itself."""
    try:
        sound = (
            checkpoint_name(manifest["step"]) == name
            and isinstance(manifest["version"], int)
            and isinstance(manifest["created"], float | int)
            and STATE in manifest["files"]
            and all({"sha256", "bytes"} == set(file) for file in manifest["files"].values())
            and manifest["adapter_sha256"] == manifest["files"][ADAPTER_WEIGHTS]["sha256"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{name}: its manifest lacks {error}") from error
    if not sound:
        raise CheckpointError(f"{name}: its manifest contradicts itself")


def _check(path: Path, expected: dict[str, Any]) -> None:
    try:
        found = _describe(path)
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name}: {error}") from error
    if found != expected:
        raise CheckpointError(f"{path.parent.name}/{path.name}: its bytes are not those of the manifest")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
