"""Downloads rollout texts (`results/rollouts`, a file a step) and wandb's offline runs (`results/wandb`).

Neighbours: `results_copy.py` calls, `runtime/gateway/steps/rollout_log.py` writes the files of steps and has
their form, `runtime/shared/wandb_log.py` has wandb write its own. Known secrets, and values that look like
one, are hidden on the way. Files on a machine may be damaged or forged: they are read by line, within bounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base import credentials
from launcher.base.errors import NotPulled
from launcher.base.log import REDACTOR
from launcher.results import checked_files
from launcher.results.checked_files import IncompleteFileError
from runtime.shared import redaction
from runtime.shared.rollout_files import FILE, order_of

ROLLOUTS = "rollouts"
WANDB = "wandb"
# Where the runtime has both: among the logs, which come home with them.
LOGS = "logs"
_OFFLINE = re.compile(r"offline-run-[\w-]{1,100}")
# Of all steps at home, the oldest go first. Of one of them, of one of wandb's files: a larger one stays away.
TOTAL_BYTES = 64 * 2**20
_STEP_BYTES = 4 * 2**20
_WANDB_BYTES = 64 * 2**20
# A link in logs/ of each wandb run, to the log of wandb's own process outside the run.
_WANDBS_LINK = "debug-core.log"


@dataclass
class DownloadedTexts:
    """The downloaded files; `skipped` names those left out, each with its reason."""

    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def download(state_dir: Path, results: Path, incoming: Path) -> DownloadedTexts:
    """Download every step's new or changed file, with its secrets hidden. Raises OSError."""
    # The guardian downloads the last texts, and was given no secrets.
    credentials.hide_secrets_of(os.environ)
    downloaded = DownloadedTexts()
    there, home = state_dir / LOGS / ROLLOUTS, results / ROLLOUTS
    for path in _files(there):
        if not FILE.fullmatch(path.name) or _stamp(path) == _stamp(home / path.name):
            continue
        with _noting_skipped(downloaded, f"{ROLLOUTS}/{path.name}"):
            stamp = _stamp(path)
            lines = _read(state_dir, path, _STEP_BYTES).splitlines()
            content = b"".join(line for text in lines if (line := _redacted_line(text)) is not None)
            home.mkdir(mode=0o700, exist_ok=True)
            _write_whole(content, home / path.name, incoming, stamp)
            downloaded.files += 1
            downloaded.bytes += len(content)
    _keep_newest(home)
    return downloaded


def changed_at(state_dir: Path) -> int:
    """When the machine's folder of texts changed last; 0 without one."""
    try:
        return (state_dir / LOGS / ROLLOUTS).lstat().st_mtime_ns
    except OSError:
        return 0


def has_new(state_dir: Path, results: Path) -> bool:
    """Whether a file of texts there is newer than all at home."""
    there, home = state_dir / LOGS / ROLLOUTS, results / ROLLOUTS
    return _newest_stamp(there) > _newest_stamp(home)


def drop_after(folder: Path, step: int) -> None:
    """Remove the texts of steps that went with a machine: of those after `step`. Raises OSError."""
    for path in _files(folder):
        named = FILE.fullmatch(path.name)
        if named is None:
            continue
        first_lost = int(named["step"]) > step or (named["kind"] == "empty" and int(named["step"]) == step)
        if first_lost:
            path.unlink(missing_ok=True)


def not_closed(why: str | None = None) -> NotPulled:
    """wandb's run was not ended before it is copied."""
    return NotPulled(
        "the copied Weights & Biases run has no end", why or "the trainer is still at work", None
    )


def download_wandb(state_dir: Path, results: Path, incoming: Path) -> DownloadedTexts:
    """wandb's offline runs, for `wandb sync`; a file of them with a known secret stays. Raises OSError."""
    downloaded = DownloadedTexts()
    there = state_dir / LOGS / WANDB
    for run in _files(there):
        if not _OFFLINE.fullmatch(run.name) or run.is_symlink():
            continue
        for path in sorted(path for path in run.rglob("*") if not path.is_dir() or path.is_symlink()):
            place = path.relative_to(there)
            if path.name == _WANDBS_LINK and path.is_symlink():
                continue
            with _noting_skipped(downloaded, f"{WANDB}/{place}"):
                content = _read(state_dir, path, _WANDB_BYTES)
                if REDACTOR.redact(text := content.decode("latin-1")) != text:
                    raise IncompleteFileError("it holds a secret")
                (results / WANDB / place.parent).mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_whole(content, results / WANDB / place, incoming, _stamp(path))
                downloaded.files += 1
                downloaded.bytes += len(content)
    return downloaded


def redact(value: Any) -> Any:
    """A value of JSON with the secrets in all of its texts hidden."""
    if isinstance(value, str):
        return redaction.hide(REDACTOR.redact(value))
    if isinstance(value, dict):
        return {redact(name): redact(it) for name, it in value.items()}
    return [redact(it) for it in value] if isinstance(value, list) else value


def _redacted_line(line: bytes) -> bytes | None:
    """A line without its secrets, which are hidden in the decoded values and not in their escapes. None if it
    is no JSON object."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    return json.dumps(redact(parsed), ensure_ascii=False).encode(errors="replace") + b"\n"


@contextlib.contextmanager
def _noting_skipped(downloaded: DownloadedTexts, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # removed as we looked: the oldest go
        return
    except IncompleteFileError as error:
        downloaded.skipped.append(f"{name}: {error}")


def _files(folder: Path) -> list[Path]:
    """The files of a folder on the machine; none if it or its parent is a link."""
    if folder.is_symlink() or folder.parent.is_symlink():
        return []
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(state_dir: Path, path: Path, most_bytes: int) -> bytes:
    """A file's content. Raises IncompleteFileError for a link on the way to it, or too large a file."""
    with checked_files.open_checked(state_dir, str(path.relative_to(state_dir))) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise IncompleteFileError(f"it is larger than {most_bytes} bytes")
    return content


def _write_whole(content: bytes, target: Path, incoming: Path, stamp: int | None) -> None:
    """Write a file whole or leave it as it was; with the time of its source, by which it is recognised."""
    aside = incoming / f"texts-{target.name}"
    aside.write_bytes(content)
    if stamp is not None:
        os.utime(aside, ns=(stamp, stamp))
    aside.replace(target)


def _newest_stamp(folder: Path) -> int:
    return max((_stamp(path) or 0 for path in _files(folder) if FILE.fullmatch(path.name)), default=0)


def _stamp(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.lstat().st_mtime_ns
    return None


def _keep_newest(home: Path) -> None:
    total = 0
    named = [path for path in _files(home) if FILE.fullmatch(path.name)]
    for path in sorted(named, key=order_of, reverse=True):
        total += path.stat().st_size
        if total > TOTAL_BYTES:
            path.unlink(missing_ok=True)
