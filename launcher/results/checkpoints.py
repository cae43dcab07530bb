"""A run's checkpoints as files: which there are, and a copy of one that is whole or is not made.

Neighbours: `home_copy.py` brings adapters home, `durable.py` whole checkpoints, both ways. The layout is
that of `runtime/shared/checkpoint.py` and `manifest.py`. What is read was written on a machine that may be
broken, or not ours any more: a name that points outside its folder and a symbolic link are refused. Reads no
tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.base import atomic
from runtime.shared.manifest import MANIFEST, STATE, text_of

PINNED = "pinned.json"
BEST = "best.json"
_NAME = re.compile(r"step-(\d{6,12})")
_CHUNK_BYTES = 1 << 20


class NotWholeError(Exception):
    """A checkpoint, or a file, is not what it should be; the text says which file."""


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
        if text != text_of(said).encode():
            raise NotWholeError("its manifest was changed after it was written")
        files: dict[str, dict[str, Any]] = said["files"]
        for name, expected in files.items():
            _check_name(name)
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


def newest_whole(checkpoints: Path) -> str | None:
    """The newest checkpoint of which every byte is as promised: what the trainer will resume from."""
    return next((name for name in names(checkpoints) if is_whole(checkpoints / name)), None)


def newest_whole_step(checkpoints: Path) -> int | None:
    """The step of that one."""
    found = newest_whole(checkpoints)
    return None if found is None else step_of(found)


def is_whole(checkpoint: Path) -> bool:
    """Whether every byte of it is as promised; all of it is read."""
    try:
        for file, expected in read_manifest(checkpoint).files.items():
            _check(_describe(checkpoint, file), expected, file)
    except (NotWholeError, OSError):
        return False
    return True


def copy(
    checkpoint: Path,
    target: Path,
    wanted: Callable[[str], str | None] = lambda name: name,
    *,
    link: bool = False,
) -> tuple[Manifest, int]:
    """Copy its files to the new folder `target`, each checked; its manifest, and how many bytes came.

    `wanted` says what a file is called there, None to leave it out. With `link` a file is linked where the
    file system can: checkpoints are never written to once they are committed. The manifest itself comes last
    and only with a whole copy. Everything is on disk when this returns. Raises NotWholeError.
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
            raise NotWholeError(f"{name} is missing") from None
        total += expected["bytes"]
    if not partial:
        (target / MANIFEST).write_bytes(manifest.text)
        atomic.sync(target / MANIFEST)
    for folder in {path.parent for path in target.rglob("*")} | {target}:
        atomic.sync(folder)
    return manifest, total


def copy_file(
    root: Path, name: str, target: Path, *, link: bool = False, expected: dict[str, Any] | None = None
) -> int:
    """Copy one file of `root` and fsync it; its size. Raises NotWholeError, also for unexpected bytes."""
    if link and _linked(root, name, target):
        found = _describe(target.parent, target.name)
    else:
        found = _copied(root, name, target)
    if expected is not None:
        _check(found, expected, name)
    return found["bytes"]


@contextmanager
def opened(root: Path, name: str) -> Iterator[BufferedReader]:
    """A regular file below `root`, no link on the way to it. Raises NotWholeError, FileNotFoundError."""
    _check_name(name)
    _refuse_links(root, name)
    # NONBLOCK: a named pipe must not hold us.
    try:
        descriptor = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotWholeError(f"{name} cannot be read ({error.strerror})") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotWholeError(f"{name} is not a file")
        yield file


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    plain = str(path) == name and not path.is_absolute() and ".." not in path.parts
    if not plain or name == "." or "\\" in name or "\0" in name:
        raise NotWholeError(f"{name!r} points outside its folder")


def _refuse_links(root: Path, name: str) -> None:
    path = root
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            raise NotWholeError(f"{path.name} is a symbolic link")


def _check(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    if found != expected:
        raise NotWholeError(f"{name} does not match its manifest")


def _linked(root: Path, name: str, target: Path) -> bool:
    """Whether the file system gave the file a second name; the checks on it follow."""
    _check_name(name)
    _refuse_links(root, name)
    try:
        os.link(root / name, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except (OSError, NotImplementedError):  # another disk, a file system without links
        return False
    return True


def _describe(root: Path, name: str) -> dict[str, Any]:
    """Its sha256 and size, as a manifest states them."""
    with opened(root, name) as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _copied(root: Path, name: str, target: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with opened(root, name) as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            writing.write(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}
