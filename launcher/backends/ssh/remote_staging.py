"""Stages the files to download, on the machine: this source is sent there and run by its python3.

    .home/checkpoints/step-000007/   the newest checkpoints and the pinned ones, under second names: they stay
                                     whole when the trainer removes them while they are copied
    .home/checkpoints/pinned.json    best.json beside it
    .home/logs/ the processes' logs, rollouts/ a file a step, wandb/ its offline runs

Neighbours: `results_download.py` sends it, with {"newest": how many, "journals": {name: [bytes, sha256] of
the copy at home}} as its argument, and reads its output: a line of JSON, {"files": {path: bytes}, "journals":
[[name, from, bytes]]}, then the journals' new bytes. Standard library only, and Python 3.8.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
from typing import Any, BinaryIO

OUT = ".home"
_CHECKPOINT = re.compile(r"step-(\d{6,12})")
_PINNED, _BEST = "pinned.json", "best.json"
# Patterns in the folder of logs; its other files stay there.
_LOGS = ("*.log", "rollouts/[a-z]*-*.jsonl", "wandb/offline-run-*")
# As `runtime/ballast.py` lays them down.
_BALLAST = os.path.join("ballast", "*")
_ROOM_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# Of one journal at a time; the rest comes with the next step.
MAX_READ_BYTES = 64 << 20


def stage(newest: int) -> dict[str, int]:
    """Fill `.home` anew. Returns the sizes of its files, by path."""
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(os.path.join(OUT, "checkpoints"))
    os.makedirs(os.path.join(OUT, "logs"))
    pinned = _pinned()
    left = newest
    for name in _checkpoints():
        wanted = left > 0 or name in pinned
        if wanted and _link_all(os.path.join("checkpoints", name)):
            left -= 1
    for name in (_PINNED, _BEST):
        _known_by_content(os.path.join("checkpoints", name))
    for pattern in _LOGS:
        for path in sorted(glob.glob(os.path.join("logs", pattern))):
            os.makedirs(os.path.join(OUT, os.path.dirname(path)), exist_ok=True)
            _link_all(path)
    return _sizes()


def new_lines(name: str, known: int, sha256: str) -> tuple[int, bytes]:
    """The lines of a file after its first `known` bytes, and their offset: 0 if the file is another one by
    now. Whole lines only."""
    with open(name, "rb") as file:
        at = known if known and _digest(file, known) == sha256 else 0
        file.seek(at)
        more = file.read(MAX_READ_BYTES)
    return at, more[: more.rfind(b"\n") + 1]


def _checkpoints() -> list[str]:
    """Newest first, as `results/checkpoints.py` names them, which is not there: this file is sent alone."""
    try:
        found = [name for name in os.listdir("checkpoints") if _CHECKPOINT.fullmatch(name)]
    except FileNotFoundError:  # any other trouble with its disk must not be taken for "it has none"
        return []
    return sorted(found, key=lambda name: int(name[5:]), reverse=True)


def _pinned() -> set[str]:
    try:
        with open(os.path.join("checkpoints", _PINNED)) as file:
            return {str(name) for name in json.load(file)}
    except (OSError, ValueError, TypeError):
        return set()


def _link_all(path: str) -> bool:
    """Give a file, or all in a folder, a second name in `.home`; False if it went meanwhile."""
    target = os.path.join(OUT, path)
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.copytree(path, target, symlinks=True, copy_function=_link)
        else:
            _link(path, target)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def _link(path: str, target: str) -> None:
    try:
        os.link(path, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without second names
        shutil.copy2(path, target, follow_symlinks=False)


def _known_by_content(path: str) -> None:
    """Copy a small file that is written anew at each change, with a time made from its content: rsync
    compares files by size and second, and two successive ones may have both in common."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return
    target = os.path.join(OUT, path)
    with open(target, "wb") as file:
        file.write(content)
    seconds = int.from_bytes(hashlib.sha256(content).digest()[:3], "big")
    os.utime(target, (seconds, seconds))


def _sizes() -> dict[str, int]:
    found = {}
    for folder, _, names in os.walk(OUT):
        for name in names:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, OUT)] = os.lstat(path).st_size
    return found


def _digest(file: BinaryIO, count: int) -> str | None:
    """The digest of its first bytes; None when it has fewer."""
    digest = hashlib.sha256()
    while count:
        chunk = file.read(min(count, _CHUNK_BYTES))
        if not chunk:
            return None
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


def main(request: dict[str, Any]) -> None:
    """Alone: of a launch that was killed a moment ago one may still be at work here."""
    _make_room()
    with open(f"{OUT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _print_answer(request)


def _make_room() -> None:
    """On a full disk, remove files that the keeper has there for that: second names take room too. The last
    one is for the end."""
    for path in sorted(glob.glob(_BALLAST))[:-1]:
        disk = os.statvfs(".")
        if disk.f_bavail * disk.f_frsize >= _ROOM_BYTES:
            return
        with contextlib.suppress(FileNotFoundError):  # the keeper has taken it meanwhile
            os.unlink(path)


def _print_answer(request: dict[str, Any]) -> None:
    files = stage(int(request["newest"]))
    journals, texts = [], []
    for name, (known, sha256) in request["journals"].items():
        try:
            at, text = new_lines(name, known, sha256)
        except OSError:
            continue
        journals.append([name, at, len(text)])
        texts.append(text)
    header = json.dumps({"files": files, "journals": journals})
    sys.stdout.buffer.write(header.encode() + b"\n" + b"".join(texts))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
