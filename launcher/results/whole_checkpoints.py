"""Finds and copies complete checkpoints: every byte matches the manifest.

Neighbours: `checkpoints.py` has their names and manifests, `checked_files.py` the files; `results_copy.py`
brings adapters home, `durable.py` whole checkpoints, both ways. Reads no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.base import atomic
from launcher.results.checked_files import IncompleteFileError, check, copy_file, digest_and_size
from launcher.results.checkpoints import Manifest, names, read_manifest, step_of
from runtime.shared.manifest import MANIFEST


def newest_whole(checkpoints: Path) -> str | None:
    """The newest complete checkpoint. The trainer will resume from it."""
    return next((name for name in names(checkpoints) if is_whole(checkpoints / name)), None)


def newest_whole_step(checkpoints: Path) -> int | None:
    """The step of the newest complete checkpoint."""
    found = newest_whole(checkpoints)
    return None if found is None else step_of(found)


def is_whole(checkpoint: Path) -> bool:
    """Whether every byte matches the manifest; reads the whole checkpoint."""
    try:
        for file, expected in read_manifest(checkpoint).files.items():
            check(digest_and_size(checkpoint, file), expected, file)
    except (IncompleteFileError, OSError):
        return False
    return True


def copy(
    checkpoint: Path,
    target: Path,
    wanted: Callable[[str], str | None] = lambda name: name,
    *,
    link: bool = False,
) -> tuple[Manifest, int]:
    """Copy its files to the new folder `target`, each checked. Returns its manifest and the number of bytes
    copied.

    `wanted` returns a file's name there, None to leave it out. With `link` a file is linked if the file
    system can: committed checkpoints are never written to. The manifest itself comes last and only with a
    whole copy. Everything is on disk when this returns. Raises IncompleteFileError.
    """
    manifest = read_manifest(checkpoint)
    target.mkdir(mode=0o700)
    total, partial = 0, False
    for name, expected in manifest.files.items():
        there = wanted(name)
        if there is None:
            partial = True
            continue
        place = target / there
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            copy_file(checkpoint, name, place, link=link, expected=expected)
        except FileNotFoundError:
            raise IncompleteFileError(f"{name} is missing") from None
        total += expected["bytes"]
    if not partial:
        (target / MANIFEST).write_bytes(manifest.text)
        atomic.sync(target / MANIFEST)
    for folder in {path.parent for path in target.rglob("*")} | {target}:
        atomic.sync(folder)
    return manifest, total
