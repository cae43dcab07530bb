"""A run's checkpoints as files: which there are, which are pinned or best, and their manifests.

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

from launcher.results.checked_files import NotWholeError, check_name, opened
from runtime.shared.manifest import MANIFEST, STATE, render

PINNED = "pinned.json"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{6,12})")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's manifest promises: sha256 and size of each of its files. `text` is its bytes."""

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
        with opened(checkpoints, PINNED) as file:
            return {str(name) for name in json.load(file)}
    except (FileNotFoundError, NotWholeError, ValueError, TypeError):
        return set()


@dataclass(frozen=True)
class Best:
    """The checkpoint that was named best last, and the work (a compile's id) that it is the best of."""

    checkpoint: str
    of: str


def best(checkpoints: Path) -> Best | None:
    """None where no optimizer has named one: what is only pinned is nobody's best."""
    try:
        with opened(checkpoints, BEST) as file:
            said = json.load(file)
            name, of = str(said["checkpoint"]), str(said["of"])
    except (FileNotFoundError, NotWholeError, ValueError, TypeError, KeyError):
        return None
    return Best(name, of) if _NAME.fullmatch(name) else None


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises NotWholeError, also when the trainer has removed it meanwhile."""
    if checkpoint.is_symlink():
        raise NotWholeError(f"{checkpoint.name} is a symbolic link")
    try:
        with opened(checkpoint, MANIFEST) as file:
            text = file.read()
    except FileNotFoundError:
        raise NotWholeError("it has no manifest") from None
    try:
        said = json.loads(text)
        if text != render(said).encode():
            raise NotWholeError("its manifest was changed after it was written")
        files: dict[str, dict[str, Any]] = said["files"]
        for name, expected in files.items():
            check_name(name)
            if set(expected) != {"sha256", "bytes"}:
                raise NotWholeError(f"its manifest has no usable entry for {name}")
        step = int(said["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotWholeError(f"its manifest cannot be read ({error})") from error
    if step != step_of(checkpoint.name):
        raise NotWholeError(f"its manifest is for step {step}")
    return Manifest(step, files, text)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Its state.json. Raises NotWholeError."""
    with opened(checkpoint, STATE) as file:
        try:
            return dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise NotWholeError(f"{STATE} cannot be read ({error})") from error


def newest_step(checkpoints: Path) -> int | None:
    """The newest committed step; whether its checkpoint is whole is not looked at, which reads all of it."""
    found = names(checkpoints)
    return step_of(found[0]) if found else None
