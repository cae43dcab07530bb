"""Resolves `RUN`, `RUN@7` or `RUN@best` to an adapter folder on this computer, in PEFT form.

Neighbours: `config/setting_sources.py` begins a new run with it (`--from`), `cli/export_verb.py` hands it on.
A run has its adapters in several places: the machine's own folder while that is on this computer, the durable
checkpoints at home, and the two that come home by name. Reads no tensors.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results import checked_files, checkpoints, durable, whole_checkpoints
from runtime.shared.manifest import MANIFEST

BEST = "best"
_STEP = re.compile(r"(?:v|step-)?0*(\d{1,12})")
_ADAPTER = "adapter"


@dataclass(frozen=True)
class RunWeights:
    """An adapter of a run. `step` is also the policy version that it was served as."""

    record: RunRecord
    step: int
    folder: Path

    @property
    def label(self) -> str:
        """Its name for people: "demo@7"."""
        return f"{self.record.name or self.record.id}@{self.step}"


def find_weights(store: RecordStore, text: str) -> RunWeights:
    """The adapter that `RUN`, `RUN@STEP` or `RUN@best` means; without a step the newest that is whole.

    Raises UsageError for a run, a step or a best that is not known here.
    """
    name, at, wanted = text.partition("@")
    record = store.load(name)
    if at and wanted != BEST and not _STEP.fullmatch(wanted):
        raise UsageError(
            f"{text}: {wanted or 'nothing'} is not a step",
            f"a step is a number, or {BEST}",
            f"launch status {name}",
        )
    folder = store.folder(record.id)
    if wanted == BEST:
        return _best(record, folder, text)
    found = _steps(record, folder)
    steps = [int(match[1])] if (match := _STEP.fullmatch(wanted)) else sorted(found, reverse=True)
    for step in steps:
        for place in found.get(step, ()):
            if _is_whole(place):
                return RunWeights(record, step, place)
    raise _no_such_step(record, text, sorted(found))


def _best(record: RunRecord, folder: Path, text: str) -> RunWeights:
    """That of the checkpoint which an optimizer named its best last."""
    for place in _checkpoint_folders(record, folder):
        best = checkpoints.best(place)
        if best is not None and _is_whole(there := place / best.checkpoint / _ADAPTER):
            return RunWeights(record, checkpoints.step_of(best.checkpoint), there)
    home = folder / RESULTS / BEST
    if (step := _step_at_home(home)) is not None:
        return RunWeights(record, step, home)
    label = record.name or record.id
    raise UsageError(
        f"{text}: no optimizer has named a best of this run",
        "GRPO names one by its validations",
        f"launch status {label}",
    )


def _steps(record: RunRecord, folder: Path) -> dict[int, list[Path]]:
    """Every step that has an adapter here, and where."""
    places: dict[int, list[Path]] = {}
    for root in _checkpoint_folders(record, folder):
        for name in checkpoints.names(root):
            places.setdefault(checkpoints.step_of(name), []).append(root / name / _ADAPTER)
    for name in (_ADAPTER, BEST):
        home = folder / RESULTS / name
        if (step := _step_at_home(home)) is not None:
            places.setdefault(step, []).append(home)
    return places


def _checkpoint_folders(record: RunRecord, folder: Path) -> list[Path]:
    machine = Path(record.machine.get("state_dir", folder / "machine"))
    return [machine / "checkpoints", folder / RESULTS / durable.FOLDER]


def _step_at_home(adapter: Path) -> int | None:
    """The step of an adapter that came home apart from its checkpoint, by its state file."""
    with contextlib.suppress(
        FileNotFoundError, checked_files.IncompleteFileError, KeyError, TypeError, ValueError
    ):
        return int(checkpoints.read_state(adapter)["step"])
    return None


def _is_whole(adapter: Path) -> bool:
    """Whether it is whole: every byte of a checkpoint is compared with its manifest; an adapter apart from
    one was compared when it came."""
    if (adapter.parent / MANIFEST).exists():
        return whole_checkpoints.is_whole(adapter.parent)
    return adapter.is_dir()


def _no_such_step(record: RunRecord, text: str, steps: list[int]) -> UsageError:
    label = record.name or record.id
    if not steps:
        return UsageError(
            f"{text}: the run has no adapter on this computer",
            "nothing of it was trained, or no results were copied",
            f"launch pull {label}" if record.live else f"launch status {label}",
        )
    listed = ", ".join(map(str, steps))
    return UsageError(
        f"{text}: that step is not on this computer",
        f"these steps are here: {listed}; older ones go unless they are pinned",
        f"launch status {label}",
    )
