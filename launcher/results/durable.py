"""Durable checkpoints: whole copies in `results/durable`, which survive the loss of the machine.

    durable/step-000007/   a checkpoint with all that a resume needs: adapter, optimizer, random state, …
    durable/pinned.json    the names of those kept for good; best.json: the one that was named best
    durable/rewound.json   the least step that a rewind of this run went back to, if there was one

*Committed* means on the machine's disk, *durable* means here. `download` makes the newest committed step and
the pinned ones durable, `restore` begins a new local machine with them: a rewind. `checkpoints_to_upload`
lists the files for a rented one. Neighbours: `whole_checkpoints.py` copies one; `results_copy.py` and
`backends/local_machine.py` call; `background_copy.py` does it while the run lives. Knows nothing of processes
or of the network.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.base import atomic
from launcher.base.errors import NotPulled, PreflightError
from launcher.base.failpoints import failpoint
from launcher.results import checked_files, checkpoints, rollout_texts, whole_checkpoints
from launcher.results.checked_files import IncompleteFileError
from launcher.results.checkpoints import Best
from launcher.results.journals import METRICS
from launcher.types.durability import DurabilityStatus
from runtime.shared.start_adapter_layout import FILES, START

FOLDER = "durable"
REWOUND = "rewound.json"
# A runtime's files about its steps and samples; void for a machine that begins again from checkpoints.
JOURNALS = (METRICS, "publications.jsonl", "validations.jsonl", "empty_steps.jsonl")
UPLOADING = ".seeding"
STEP_STATE = ("steps", "samples", "checkpoints", "serving.json", *JOURNALS)


@dataclass
class DownloadedCheckpoints:
    """The result of one `download`; `skipped` names incomplete checkpoints, each with its reason."""

    step: int | None = None
    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckpointUpload:
    """The checkpoints that a new machine gets. `folders`: whole checkpoints, the newest first, then pinned
    ones; of step 0 the adapter alone. `journals`: the files that were written line by line. `texts`: the
    content of small files, by their name beside the checkpoints, with `rewound`, the file that tells the
    runtime of a rewind, if there was one.
    """

    step: int
    folders: tuple[Path, ...]
    journals: tuple[Path, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    rewound: str | None = None


def durability_status(state_dir: Path, results: Path) -> DurabilityStatus:
    """Both steps, as the two folders show them now."""
    return DurabilityStatus(checkpoints.newest_step(state_dir / "checkpoints"), newest_step(results))


def all_incomplete_error(there: Path, skipped: list[str]) -> NotPulled:
    """The error for checkpoints that are all broken."""
    return NotPulled("no checkpoint of the run is complete", "; ".join(skipped), f"ls -lR {there}")


def newest_step(results: Path) -> int | None:
    """The newest durable step."""
    return checkpoints.newest_step(results / FOLDER)


def is_current(state_dir: Path, results: Path) -> bool:
    """Whether the newest committed checkpoint and the pinned ones are durable; reads a few small files."""
    there, home = state_dir / "checkpoints", results / FOLDER
    names = checkpoints.names(there)
    wanted = {*names[:1], *(checkpoints.pinned(there) & set(names))}
    return (
        all(_same_manifest(there / name, home / name) for name in wanted)
        and checkpoints.pinned(there) & set(names) <= checkpoints.pinned(home)
        and _best_among(there, set(names)) in (None, checkpoints.best(home))
    )


def download(state_dir: Path, results: Path, incoming: Path, last: bool = False) -> DownloadedCheckpoints:
    """Make the newest whole checkpoint and the pinned ones durable. `incoming` is a folder on the same disk.

    Older durable checkpoints stay until the new one is whole and in place. Raises NotPulled when there are
    checkpoints and none is whole, unless nothing more can come (`last`), IncompleteFileError for a link in
    their place.
    """
    there, home = state_dir / "checkpoints", results / FOLDER
    downloaded = DownloadedCheckpoints()
    if there.is_symlink():
        raise IncompleteFileError(f"{there.name} is a symbolic link")
    names = checkpoints.names(there)
    if not names:
        return downloaded
    home.mkdir(mode=0o700, exist_ok=True)
    newest = next((name for name in names if _download_one(there, home, name, incoming, downloaded)), None)
    if newest is None:
        if last:
            return downloaded
        raise all_incomplete_error(there, downloaded.skipped)
    kept = {newest}
    for name in sorted(checkpoints.pinned(there) & set(names)):
        if name == newest or _download_one(there, home, name, incoming, downloaded):
            kept.add(name)
    _write_pins(home, sorted(checkpoints.pinned(there) & kept))
    _write_best(home, _best_among(there, kept))
    _remove_older(home, newest, kept, incoming)
    downloaded.step = checkpoints.step_of(newest)
    return downloaded


def restore(results: Path, state_dir: Path) -> int:
    """Begin a new machine at the last durable step, which is returned; `rewound.json` tells the runtime.

    Before any durable step it begins with the run's initial adapter. That is step 0, and a rewind if versions
    were served before. Other steps and samples in the folder are removed. A kill at any instant leaves a
    machine with nothing to resume from, or with all of it. Raises PreflightError.
    """
    home = results / FOLDER
    newest = _newest_to_restore(results)
    try:
        for name in (*STEP_STATE, UPLOADING):
            _remove(state_dir / name)
        if newest is None:
            return _restore_initial_adapter(results, state_dir)
        _copy_checkpoints(state_dir / UPLOADING, home, newest)
        for journal in JOURNALS:
            with contextlib.suppress(FileNotFoundError):
                checked_files.copy_file(results, journal, state_dir / journal)
        state = checkpoints.read_state(state_dir / UPLOADING / newest)
        step = checkpoints.step_of(newest)
        for folder in (state_dir / rollout_texts.LOGS, results):
            rollout_texts.drop_after(folder / rollout_texts.ROLLOUTS, step)
        _write_rewound(home, state_dir, step, state.get("client_state"))
        failpoint("durable.seeding")
        (state_dir / UPLOADING).rename(state_dir / "checkpoints")
        atomic.sync(state_dir)
    except (OSError, IncompleteFileError) as error:
        raise PreflightError(
            f"cannot restart the run from {home}", str(error), f"df -h {state_dir}"
        ) from error
    return step


def checkpoints_to_upload(results: Path) -> CheckpointUpload:
    """The files that `restore` would use, for a machine that is not on this computer. Raises
    PreflightError."""
    home = results / FOLDER
    newest = _newest_to_restore(results)
    try:
        if newest is None:
            again = (home / REWOUND).exists()
            return CheckpointUpload(0, (results / START,), rewound=_rewound(home, 0, None) if again else None)
        pins = [name for name in _pins_to_restore(home, newest) if whole_checkpoints.is_whole(home / name)]
        state = checkpoints.read_state(home / newest)
        texts = _small_files(home, {newest, *pins})
        journals = tuple(results / name for name in JOURNALS if (results / name).is_file())
        step = checkpoints.step_of(newest)
        rollout_texts.drop_after(results / rollout_texts.ROLLOUTS, step)
        folders = tuple(home / name for name in (newest, *pins))
        return CheckpointUpload(
            step, folders, journals, texts, _rewound(home, step, state.get("client_state"))
        )
    except (OSError, IncompleteFileError) as error:
        raise PreflightError(f"cannot restart the run from {home}", str(error), f"ls -lR {home}") from error


def mark_served(results: Path) -> None:
    """Record that versions of this run were served, before any of its steps is durable.

    Raises PreflightError.
    """
    home = results / FOLDER
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _reused_after(home, 0)
    except OSError as error:
        raise PreflightError(f"cannot write in {home}", str(error), f"df -h {results}") from error


def _restore_initial_adapter(results: Path, state_dir: Path) -> int:
    """The adapter itself comes last: a machine without it has nothing to begin with."""
    if (results / FOLDER / REWOUND).exists():
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_rewound(results / FOLDER, state_dir, 0, None)
    _copy_initial_adapter(results / START, state_dir / START)
    return 0


def _write_rewound(home: Path, state_dir: Path, step: int, client_state: Any) -> None:
    _write(state_dir / REWOUND, _rewound(home, step, client_state))


def _rewound(home: Path, step: int, client_state: Any) -> str:
    """The content of the file that tells the runtime of a rewind (`runtime/gateway/steps/rewind.py`)."""
    rewind = {"to_step": step, "reused_after": _reused_after(home, step), "time": time.time()}
    return json.dumps(rewind | {"client_state": client_state})


def _reused_after(home: Path, step: int) -> int:
    """The least step of all rewinds so far, kept at home: versions after it were given out before."""
    with contextlib.suppress(FileNotFoundError):
        step = min(step, int(json.loads((home / REWOUND).read_text())["reused_after"]))
    _write(home / REWOUND, json.dumps({"reused_after": step}))
    return step


def save_initial_adapter(results: Path, adapter: Path) -> None:
    """Keep a copy of the run's initial adapter, for `restore`. Raises PreflightError."""
    results.mkdir(mode=0o700, exist_ok=True)
    _copy_initial_adapter(adapter, results / START)


def _copy_initial_adapter(adapter: Path, target: Path) -> None:
    """Copy it whole or not at all: the rename comes last."""
    aside = target.with_name(f".{target.name}.tmp")
    try:
        _remove(aside)
        aside.mkdir(mode=0o700, parents=True)
        for name in FILES:
            shutil.copyfile(adapter / name, aside / name)
            atomic.sync(aside / name)
        _remove(target)
        aside.rename(target)
        atomic.sync(target.parent)
    except OSError as error:
        raise PreflightError(
            f"cannot copy the adapter {adapter} to the run", str(error), f"ls -l {adapter}"
        ) from error


def _copy_checkpoints(there: Path, home: Path, newest: str) -> None:
    """Copy the newest durable checkpoint and the pinned ones before it that are whole.

    Copies, no links: files at home must not change when the machine changes its own.
    """
    there.mkdir(mode=0o700)
    whole_checkpoints.copy(home / newest, there / newest)
    downloaded = {newest}
    for name in _pins_to_restore(home, newest):
        with contextlib.suppress(IncompleteFileError):
            whole_checkpoints.copy(home / name, there / name)
            downloaded.add(name)
    for name, text in _small_files(home, downloaded).items():
        _write(there / name, text)


def _newest_to_restore(results: Path) -> str | None:
    """The newest durable checkpoint; None if the adapter of the start is all. Raises PreflightError."""
    home = results / FOLDER
    newest = whole_checkpoints.newest_whole(home)
    if newest is None and not (results / START).is_dir():
        raise PreflightError(
            "the run has no durable checkpoint", f"no complete checkpoint in {home}", f"ls -lR {home}"
        )
    return newest


def _pins_to_restore(home: Path, newest: str) -> list[str]:
    """The pinned checkpoints before the newest, the newer ones first."""
    pins = checkpoints.pinned(home)
    return [
        name
        for name in checkpoints.names(home)
        if name in pins and checkpoints.step_of(name) < checkpoints.step_of(newest)
    ]


def _small_files(home: Path, downloaded: set[str]) -> dict[str, str]:
    """The small files beside these checkpoints: the list of pinned ones, and the one that was named best."""
    texts = {checkpoints.PINNED: json.dumps(sorted(checkpoints.pinned(home) & downloaded))}
    if (best := _best_among(home, downloaded)) is not None:
        texts[checkpoints.BEST] = json.dumps(asdict(best))
    return texts


def _same_manifest(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same manifest. If both were whole, they have the same bytes."""
    try:
        return (one / checkpoints.MANIFEST).read_bytes() == (other / checkpoints.MANIFEST).read_bytes()
    except OSError:
        return False


def _download_one(
    there: Path, home: Path, name: str, incoming: Path, downloaded: DownloadedCheckpoints
) -> bool:
    """Make one checkpoint durable; False, with the reason in `skipped`, when it is incomplete."""
    if _same_manifest(there / name, home / name):
        return True
    aside = incoming / f"durable-{name}"
    try:
        manifest, size = whole_checkpoints.copy(there / name, aside, link=True)
    except IncompleteFileError as error:  # or the trainer removed it as we looked
        downloaded.skipped.append(f"{name}: {error}")
        return False
    if (home / name).exists():  # the same step of a run that was rewound and took it again
        (home / name).rename(incoming / f"durable-{name}-before")
    aside.rename(home / name)
    atomic.sync(home)
    downloaded.files += len(manifest.files) + 1
    downloaded.bytes += size + len(manifest.text)
    return True


def _write_pins(home: Path, pins: list[str]) -> None:
    if checkpoints.pinned(home) == set(pins):
        return
    _write(home / checkpoints.PINNED, json.dumps(pins))


def _best_among(folder: Path, names: set[str]) -> Best | None:
    """The one named best, if it is one of these."""
    best = checkpoints.best(folder)
    return best if best is not None and best.checkpoint in names else None


def _write_best(home: Path, best: Best | None) -> None:
    if best is None or checkpoints.best(home) == best:
        return
    _write(home / checkpoints.BEST, json.dumps(asdict(best)))


def _remove_older(home: Path, newest: str, kept: set[str], incoming: Path) -> None:
    """Renamed first, so that a half-removed one does not look like a checkpoint."""
    for name in checkpoints.names(home):
        if name not in kept and checkpoints.step_of(name) < checkpoints.step_of(newest):
            (home / name).rename(incoming / f"durable-{name}-old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    atomic.write(path, text, durable=True, locked=True)
