"""A run's checkpoints on disk: their names, pins, the best one, and manifests.

Neighbours: `whole_checkpoints.py` reads and copies all of one, `checked_files.py` opens the files. The layout
is that of `runtime/shared/checkpoint.py` and `manifest.py`. Reads no tensors.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.results.checked_files import IncompleteFileError, check_name, open_checked
from runtime.shared.manifest import MANIFEST, STATE, render

PINNED = "pinned.json"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{6,12})")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest: sha256 and size of each of its files. `text` is its bytes."""

    step: int
    files: dict[str, dict[str, Any]]
    text: bytes


def names(checkpoints: Path) -> list[str]:
    """The committed checkpoints, newest first."""
    if checkpoints.is_symlink():
        return []
    try:
        entries = os.listdir(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((name for name in entries if _NAME.fullmatch(name)), key=step_of, reverse=True)


def step_of(name: str) -> int:
    """7 of `step-000007`."""
    match = _NAME.fullmatch(name)
    assert match is not None  # `names` let it in
    return int(match.group(1))


def pinned(checkpoints: Path) -> set[str]:
    """The names that are kept for good."""
    try:
        with open_checked(checkpoints, PINNED) as file:
            return {str(name) for name in json.load(file)}
    except (FileNotFoundError, IncompleteFileError, ValueError, TypeError):
        return set()


@dataclass(frozen=True)
class Best:
    """The checkpoint that was named best last, and the work (a compile's id) that it belongs to."""

    checkpoint: str
    of: str


def best(checkpoints: Path) -> Best | None:
    """None if no optimizer has named one: a pinned checkpoint alone is not the best."""
    try:
        with open_checked(checkpoints, BEST) as file:
            content = json.load(file)
            name, of = str(content["checkpoint"]), str(content["of"])
    except (FileNotFoundError, IncompleteFileError, ValueError, TypeError, KeyError):
        return None
    return Best(name, of) if _NAME.fullmatch(name) else None


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises IncompleteFileError, also when the trainer has removed it meanwhile."""
    if checkpoint.is_symlink():
        raise IncompleteFileError(f"{checkpoint.name} is a symbolic link")
    try:
        with open_checked(checkpoint, MANIFEST) as file:
            text = file.read()
    except FileNotFoundError:
        raise IncompleteFileError("it has no manifest") from None
    try:
        manifest = json.loads(text)
        if text != render(manifest).encode():
            raise IncompleteFileError("its manifest was changed after it was written")
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, expected in files.items():
            check_name(name)
            if set(expected) != {"sha256", "bytes"}:
                raise IncompleteFileError(f"its manifest has no usable entry for {name}")
        step = int(manifest["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteFileError(f"its manifest cannot be read ({error})") from error
    if step != step_of(checkpoint.name):
        raise IncompleteFileError(f"its manifest is for step {step}")
    return Manifest(step, files, text)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Its state.json. Raises IncompleteFileError."""
    with open_checked(checkpoint, STATE) as file:
        try:
            return dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise IncompleteFileError(f"{STATE} cannot be read ({error})") from error


def newest_step(checkpoints: Path) -> int | None:
    """The newest committed step; whether its checkpoint is whole is not looked at, which reads all of it."""
    found = names(checkpoints)
    return step_of(found[0]) if found else None
