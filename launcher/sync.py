"""Brings a run's results home: whole files only, each checked against the checkpoint's own checksums.

    adapter/   the newest whole checkpoint's adapter (PEFT form) with its state.json
    best/      the same of the newest pinned checkpoint, when there is one
    metrics.jsonl  publications.jsonl  logs/

Neighbours: `machines/local.py` calls `pull` on the runtime's own folder. What is there already is replaced
only by what is whole, so a pull may be repeated, killed, or run while the trainer commits.
Knows the layout of checkpoints (`runtime/training/checkpoint.py`); reads no tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import NotPulled
from launcher.machines.base import PullReport

_ADAPTER = "adapter/"
_STATE = "state.json"
_JOURNALS = ("metrics.jsonl", "publications.jsonl")
_CHUNK_BYTES = 1 << 20


class _BrokenError(Exception):
    """A checkpoint is not whole; the text says which file."""


@dataclass
class _Tally:
    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def pull(state_dir: Path, into: Path) -> PullReport:
    """Copy what the run has so far from its folder. Raises NotPulled when that cannot be done in full."""
    begun = time.monotonic()
    tally = _Tally()
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_pull(into), tempfile.TemporaryDirectory(prefix=".incoming-", dir=into) as incoming:
            step = _pull_checkpoints(state_dir / "checkpoints", into, Path(incoming), tally)
            for name in _JOURNALS:
                _pull_journal(state_dir / name, into / name, Path(incoming), tally)
            _pull_logs(state_dir / "logs", into / "logs", Path(incoming), tally)
    except OSError as error:
        raise NotPulled(
            f"the results could not be brought to {into}",
            f"{error.strerror or error}: {error.filename or ''}".rstrip(": "),
            f"ls -l {state_dir}",
        ) from error
    return PullReport(into, tally.files, tally.bytes, time.monotonic() - begun, step, tuple(tally.skipped))


@contextlib.contextmanager
def _only_pull(into: Path) -> Iterator[None]:
    """One pull at a time; what a killed one left behind is removed."""
    descriptor = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for debris in into.glob(".incoming-*"):
            shutil.rmtree(debris)
        yield
    finally:
        os.close(descriptor)


def _pull_checkpoints(checkpoints: Path, into: Path, incoming: Path, tally: _Tally) -> int | None:
    """The newest whole checkpoint as `adapter`, the newest pinned one as `best`; the step of the first."""
    names = sorted((path.name for path in checkpoints.glob("step-*")), reverse=True)
    step = _pull_first_whole(checkpoints, names, into / "adapter", incoming, tally)
    if names and step is None:
        raise NotPulled(
            "no checkpoint of the run is whole", "; ".join(tally.skipped), f"ls -lR {checkpoints}"
        )
    pinned = [name for name in names if name in _pinned(checkpoints)]
    _pull_first_whole(checkpoints, pinned, into / "best", incoming, tally)
    return step


def _pull_first_whole(
    checkpoints: Path, names: list[str], target: Path, incoming: Path, tally: _Tally
) -> int | None:
    for name in names:
        try:
            return _pull_checkpoint(checkpoints / name, target, incoming / f"{target.name}-{name}", tally)
        except (_BrokenError, FileNotFoundError) as error:  # the trainer removes old ones as we look
            tally.skipped.append(f"{name}: {error}")
    return None


def _pull_checkpoint(checkpoint: Path, target: Path, incoming: Path, tally: _Tally) -> int:
    """Copy one checkpoint's adapter aside, checked, then put it in place; its step."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        expected: dict[str, Any] = manifest["files"]
        step = int(manifest["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise _BrokenError(f"its manifest cannot be read ({error})") from error
    incoming.mkdir()
    total = 0
    wanted = [name for name in expected if name.startswith(_ADAPTER) or name == _STATE]
    for name in wanted:
        found = _copy(checkpoint / name, incoming / name.removeprefix(_ADAPTER))
        if found != expected[name]:
            raise _BrokenError(f"{name} is not what its manifest says")
        total += found["bytes"]
    if target.exists():
        target.rename(incoming.with_name(f"{incoming.name}-before"))
    incoming.rename(target)
    tally.files += len(wanted)
    tally.bytes += total
    return step


def _pinned(checkpoints: Path) -> set[str]:
    try:
        return set(json.loads((checkpoints / "pinned.json").read_text()))
    except FileNotFoundError:
        return set()


def _pull_journal(source: Path, target: Path, incoming: Path, tally: _Tally) -> None:
    """Copy a file of lines that may be growing: whole lines only."""
    try:
        lines = source.read_bytes()
    except FileNotFoundError:
        return
    aside = incoming / source.name
    aside.write_bytes(lines[: lines.rfind(b"\n") + 1])
    aside.replace(target)
    tally.files += 1
    tally.bytes += target.stat().st_size


def _pull_logs(source: Path, target: Path, incoming: Path, tally: _Tally) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for log in sorted(source.glob("*.log")):
        tally.bytes += _copy(log, incoming / log.name)["bytes"]
        (incoming / log.name).replace(target / log.name)
        tally.files += 1


def _copy(source: Path, target: Path) -> dict[str, Any]:
    """Copy and fsync; the sha256 and size of what was read, as a manifest states them."""
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            writing.write(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}
