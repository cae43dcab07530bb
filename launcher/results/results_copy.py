"""Copies a run's results into its results folder: whole files only, checked against the checkpoint's
checksums.

    adapter/   the newest whole checkpoint's adapter (PEFT form) with its state.json
    best/      the same of the checkpoint that an optimizer last named its best; best.json names it
    durable/   whole checkpoints, complete enough to resume from (`durable.py`)
    metrics.jsonl  publications.jsonl  logs/
    rollouts/  wandb/      the rollout texts of each step, and wandb's offline runs (`rollout_texts.py`)

Neighbours: `backends/local_machine.py` calls `pull` at the end and `make_durable` while the run lives. A file
at home is replaced only by a whole one, so both calls may be repeated, killed, or run while the trainer
commits.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.base import locks
from launcher.base.errors import NotPulled
from launcher.base.failpoints import failpoint
from launcher.results import checked_files, checkpoints, durable, journals, rollout_texts, whole_checkpoints
from launcher.results.checked_files import IncompleteFileError
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import PullReport

_ADAPTER = "adapter/"
# Another pull of the same run is waited for so long.
_PULL_SECONDS = 300.0
# File systems note times by a clock that ticks every 1 to 10 ms.
_SETTLED_NS = 50_000_000
_READ_EVERY_SECONDS = 1.0

_Times = tuple[int, int, int]


@dataclass
class _Tally:
    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size


def pull(state_dir: Path, into: Path, last: bool = False) -> PullReport:
    """Copy the run's results so far from its folder. Raises NotPulled when that cannot be done in full.

    `last`: nothing more can come, so incomplete checkpoints are left out without an error.
    """
    begun = time.monotonic()
    tally = _Tally()
    with _incoming_folder(state_dir, into) as incoming:
        downloaded = durable.download(state_dir, into, incoming, last)
        tally.files, tally.bytes, tally.skipped = downloaded.files, downloaded.bytes, downloaded.skipped
        step = _pull_adapters(state_dir / "checkpoints", into, incoming, tally, last)
        failpoint("cli.pulling")
        for name in durable.JOURNALS:
            _pull_journal(state_dir, name, into, tally)
        for downloaded in (
            rollout_texts.download(state_dir, into, incoming),
            rollout_texts.download_wandb(state_dir, into, incoming),
        ):
            tally.files += downloaded.files
            tally.bytes += downloaded.bytes
            tally.skipped += downloaded.skipped
        _pull_logs(state_dir, into / "logs", incoming, tally)
    return PullReport(into, tally.files, tally.bytes, time.monotonic() - begun, step, tuple(tally.skipped))


def make_durable(state_dir: Path, into: Path) -> DurabilityStatus:
    """Make the committed step durable; returns the durability then. Cheap when there is nothing to do.

    Raises NotPulled when it cannot be done.
    """
    if durable.is_current(state_dir, into):
        if rollout_texts.has_new(state_dir, into):  # of an empty step, or of a validation
            with _incoming_folder(state_dir, into) as incoming:
                rollout_texts.download(state_dir, into, incoming)
        return durable.durability_status(state_dir, into)
    with _incoming_folder(state_dir, into) as incoming:
        downloaded = durable.download(state_dir, into, incoming)
        for name in durable.JOURNALS:
            _pull_journal(state_dir, name, into, _Tally())
        rollout_texts.download(state_dir, into, incoming)
    return replace(durable.durability_status(state_dir, into), trouble="; ".join(downloaded.skipped) or None)


class DurableWatcher:
    """A fast `make_durable`, for many calls a second: unchanged folders are not read again.

    A checkpoint, and the list of pins, change by a rename in one of two folders, which changes that folder's
    time. A folder that changed just now may change again within the same clock tick, so it is read again.
    Once a second everything is read.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._known: tuple[_Times, DurabilityStatus] | None = None
        self._read_at = 0.0

    def look(self, into: Path) -> DurabilityStatus:
        """Like `make_durable`. Raises NotPulled."""
        began, times = time.monotonic(), _times(self._state_dir, into)
        if self._known and self._known[0] == times and began - self._read_at < _READ_EVERY_SECONDS:
            return self._known[1]
        is_settled = times is not None and time.time_ns() - max(times) > _SETTLED_NS
        durability = make_durable(self._state_dir, into)
        self._read_at = began
        self._known = (times, durability) if times and is_settled and durability.trouble is None else None
        return durability


def _times(state_dir: Path, into: Path) -> _Times | None:
    """The last changes of the folders of committed and of durable checkpoints, and of texts; None if one of
    checkpoints is missing."""
    try:
        there, home = (folder.lstat() for folder in (state_dir / "checkpoints", into / durable.FOLDER))
    except OSError:
        return None
    return there.st_mtime_ns, home.st_mtime_ns, rollout_texts.changed_at(state_dir)


def copy_newest_adapter(state_dir: Path, into: Path) -> None:
    """Copy the newest adapter before the rest of its checkpoint has arrived. Raises NotPulled."""
    there = state_dir / "checkpoints"
    with _incoming_folder(state_dir, into) as incoming:
        _pull_first_whole(there, checkpoints.names(there)[:1], into / "adapter", incoming, _Tally())


@contextlib.contextmanager
def _incoming_folder(state_dir: Path, into: Path) -> Iterator[Path]:
    """A folder for incomplete files, for one pull at a time; the remains of a killed pull are removed."""
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _pull_lock(into), tempfile.TemporaryDirectory(prefix=".incoming-", dir=into) as incoming:
            yield Path(incoming)
    except (OSError, IncompleteFileError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
        raise NotPulled(
            f"could not copy the results to {into}",
            f"{why}; they are still in {state_dir}",
            f"ls -l {state_dir}",
        ) from error


@contextlib.contextmanager
def _pull_lock(into: Path) -> Iterator[None]:
    with locks.exclusive(into, _PULL_SECONDS):
        for leftover in into.glob(".incoming-*"):
            shutil.rmtree(leftover)
        yield


def _pull_adapters(there: Path, into: Path, incoming: Path, tally: _Tally, last: bool) -> int | None:
    """The newest whole checkpoint as `adapter`, the one named best as `best`; the step of the first."""
    names = checkpoints.names(there)
    step = _pull_first_whole(there, names, into / "adapter", incoming, tally)
    if names and step is None and not last:
        raise durable.all_incomplete_error(there, tally.skipped)
    _pull_best(there, names, into / "best", incoming, tally)
    return step


def _pull_best(there: Path, names: list[str], target: Path, incoming: Path, tally: _Tally) -> None:
    """Bring the best checkpoint's files home. Files at home stay if no other checkpoint was named, or the
    named one is gone."""
    best = checkpoints.best(there)
    if best is None or best.checkpoint not in names:
        return
    if _pull_first_whole(there, [best.checkpoint], target, incoming, tally) is None:
        return
    aside = incoming / checkpoints.BEST
    aside.write_text(json.dumps({"checkpoint": best.checkpoint, "of": best.of}) + "\n")
    tally.add(aside.stat().st_size)
    aside.replace(target / checkpoints.BEST)


def _pull_first_whole(
    there: Path, names: list[str], target: Path, incoming: Path, tally: _Tally
) -> int | None:
    for name in names:
        aside = incoming / f"{target.name}-{name}"
        try:
            manifest, size = whole_checkpoints.copy(there / name, aside, _adapter_files)
        except IncompleteFileError as error:  # or the trainer removed it as we looked
            reason = f"{name}: {error}"
            if reason not in tally.skipped:
                tally.skipped.append(reason)
            continue
        if target.exists():
            target.rename(incoming / f"{target.name}-before")
        aside.rename(target)
        tally.files += sum(_adapter_files(file) is not None for file in manifest.files)
        tally.bytes += size
        return manifest.step
    return None


def _adapter_files(name: str) -> str | None:
    """The name at home of a file that PEFT needs, flat in one folder, or of the checkpoint's state."""
    if name.startswith(_ADAPTER):
        return name.removeprefix(_ADAPTER)
    return name if name == checkpoints.STATE else None


def _pull_journal(state_dir: Path, name: str, into: Path, tally: _Tally) -> None:
    """Append to the journal at home the whole lines that it lacks; the source may be growing."""
    try:
        with checked_files.open_checked(state_dir, name) as file:
            journals.append_new_lines(file, into / name)
    except FileNotFoundError:
        return
    except IncompleteFileError as error:
        tally.skipped.append(str(error))
        return
    tally.add((into / name).stat().st_size)


def _pull_logs(state_dir: Path, target: Path, incoming: Path, tally: _Tally) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for log in sorted((state_dir / "logs").glob("*.log")):
        try:
            tally.add(checked_files.copy_file(state_dir, f"logs/{log.name}", incoming / log.name))
        except (IncompleteFileError, FileNotFoundError) as error:
            tally.skipped.append(f"{log.name}: {error}")
            continue
        (incoming / log.name).replace(target / log.name)
