"""Taking up a run that ended or was killed: which run that is, from which step, and as what it was begun.

Neighbours: `run.py` lives it again under its own id, `request.py` merges what it was begun with and what is
asked anew, `durable.py` has what survived where the machine did not. Knows nothing of printing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import PreflightError, UsageError
from launcher.ledger.endpoint import RESULTS
from launcher.ledger.records import LiveRunError, RecordStore, RunRecord
from launcher.results import checkpoints, durable
from launcher.safety import take_down
from launcher.values.machine import Machine
from launcher.values.settings import TINY_MODEL, Settings, Value
from runtime.shared.start_adapter import START

# What decides which policy the checkpoints hold: anything else may be given anew.
_FIXED = ("dtype", "train.lora.rank", "train.lora.alpha")
# Where nobody says, a rented machine decides: GPUs have other defaults than a CPU.
_BY_MACHINE = ("dtype", "engines", "train_processes")
# Settings of ours that a resumed run keeps, and the field of Settings each one is.
_KEPT = {
    "model": "model",
    "max": "max_seconds",
    "lease": "lease_seconds",
    "budget": "budget",
    "port": "port",
    "openai_env": "openai_env",
    "wandb": "wandb",
    "gpus": "gpus",
    "infra": "infra",
    "train_gpus": "train_gpus",
    "infer_gpus": "infer_gpus",
    "disk": "disk_gb",
    "idle": "idle_seconds",
    "grace": "grace_seconds",
    "copy_rate": "copy_rate",
    "keep_output": "keep_output",
    "max_price": "max_price",
}


@dataclass(frozen=True)
class Resumed:
    """A run to be taken up after `step`. `rewinds`: the machine's state is gone, what is durable is used, or,
    at step 0, the adapter that it began with."""

    record: RunRecord
    step: int
    rewinds: bool

    @property
    def command(self) -> tuple[str, ...]:
        """The command it ran."""
        return self.record.command

    @property
    def folder(self) -> Path | None:
        """The folder its command ran in. Raises PreflightError when that is gone."""
        folder = self.record.details.get("folder")
        if folder is None:
            return None
        if not Path(folder).is_dir():
            label = self.record.name or self.record.id
            raise PreflightError(
                f"{label} ran its program in {folder}",
                "that folder is not there any more",
                f"launch --resume {label} -- COMMAND   (runs it in this folder)",
            )
        return Path(folder)

    def describe(self) -> str:
        """For the plan's line: "resuming after step 7"."""
        gone = "what the machine had is gone"
        if self.rewinds and self.step == 0:
            return f"resuming with the adapter that it began with: {gone}"
        how = f", the last durable one: {gone}" if self.rewinds else ""
        return f"resuming after step {self.step}{how}"


def details(settings: Settings, model_path: str, folder: Path | None = None) -> dict[str, Any]:
    """What a record keeps so that the run can be taken up; its program runs in `folder`, or here."""
    kept = {key: settings.values[key].value for key in _KEPT}
    # A relative folder would be another one elsewhere; the embedded model moves with the package.
    kept["model"] = TINY_MODEL if settings.model == TINY_MODEL else model_path
    known = _runtime_keys()
    runtime = {
        key: value.value
        for key, value in settings.values.items()
        if key in known and not (settings.gpus and key in _BY_MACHINE and value.source == "default")
    }
    return {
        "settings": kept,
        "runtime": runtime,
        "model_path": model_path,
        "adapter": str(settings.adapter.folder) if settings.adapter else None,
        "folder": str(folder or Path.cwd()),
    }


def find(
    store: RecordStore,
    id_or_name: str,
    machine_of: Callable[[RunRecord], Machine],
    say: Callable[[str], None],
) -> Resumed:
    """The run, over and proven to be down, and the step after which it goes on.

    Waits for a guardian that is at work, and ends what nobody looks after. Raises UsageError for a run that
    lives and for one that has nothing to resume, NotPulled where its machine is kept for results that cannot
    be brought home, TeardownUnverified.
    """
    record = _ended(store, store.load(id_or_name), say)
    step = machine_of(record).committed()
    if step is not None:
        return Resumed(record, step, rewinds=False)
    results = store.folder(record.id) / RESULTS
    newest = checkpoints.newest_whole(results / durable.FOLDER)
    if newest is not None:
        return Resumed(record, checkpoints.step_of(newest), rewinds=True)
    if (results / START).is_dir():
        return Resumed(record, 0, rewinds=True)
    command = f" -- {' '.join(record.command)}" if record.command else ""
    raise UsageError(
        f"{id_or_name} has nothing to resume",
        "no step of it was ever committed, or nothing of it is left",
        f"launch{command}   (the same run from its beginning)",
    )


def settings(given: Settings, record: RunRecord) -> Settings:
    """The run's recorded settings, and over them what is given anew on the command line.

    Raises UsageError for what would make another policy of it than its checkpoints hold.
    """
    kept: Mapping[str, Any] = record.details.get("settings", {})
    runtime: Mapping[str, Any] = record.details.get("runtime", {})
    label = record.name or record.id
    if given.name is not None and given.name != record.name:
        raise UsageError(
            f"{label} keeps its name", f"--name {given.name} is another one", f"launch --resume {label}"
        )
    values = dict(given.values)
    if given.adapter is not None and _anew(values["model"]):
        raise refused(label, f"the adapter {given.adapter.folder}", str(kept.get("model")))
    recorded = {key: value for key, value in {**kept, **runtime}.items() if key in values}
    for key, value in recorded.items():
        if not _anew(values[key]):
            values[key] = Value(value, f"the record of {label}")
    for key in _FIXED:
        if key in recorded and _typed(key, values[key].value) != _typed(key, recorded[key]):
            raise refused(label, f"{key} = {values[key].value}", f"{recorded[key]}")
    fields = {field: values[key].value for key, field in _KEPT.items()}
    overrides = {**given.runtime, **{key: values[key].value for key in runtime if key in values}}
    # What the run once began with is in its checkpoints.
    return replace(given, **fields, name=record.name, runtime=overrides, values=values, adapter=None)


def refused(label: str, wanted: str, was: str) -> UsageError:
    """The error for a setting that would change what is trained."""
    return UsageError(
        f"{label} cannot be resumed with {wanted}",
        f"it was begun with {was}: its checkpoints hold another policy than that",
        f"launch --resume {label}   (or a new run, without --resume)",
    )


def _ended(store: RecordStore, record: RunRecord, say: Callable[[str], None]) -> RunRecord:
    """The record of a run that is over; what is left of one that nobody looks after is ended here."""
    if record.live and record.launch is not None and record.launch.alive():
        raise LiveRunError(record)
    record = take_down.after_guardian(store, record, say)
    if not record.live:
        return record
    if record.attended:
        raise LiveRunError(record)
    return take_down.take_down(store, record, "resume", say)


def _anew(value: Value) -> bool:
    """Whether it was said on this command line."""
    return value.source.startswith("--")


def _runtime_keys() -> set[str]:
    from launcher.asking import runtime_config

    return set(runtime_config.defaults())


def _typed(key: str, value: Any) -> Any:
    """The value as the runtime reads it: "16" of a command line is 16."""
    from launcher.asking import runtime_config

    ours = dict.fromkeys(("run_id", "model_path", "state_dir", "socket_dir"), "-")
    found: Any = runtime_config.build({key: value}, **ours)
    for room in key.split("."):
        found = getattr(found, room)
    return found
