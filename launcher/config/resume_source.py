"""The run that `--resume` names: its recorded settings, and those that may be changed.

Neighbours: `request_validation.py` merges it with the new request, `run.py` has the record keep it;
`resume_point.py` ends the run's leftovers and finds the step from which it goes on. Only reads: nothing is
ended or started here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.base import embedded_models
from launcher.base.errors import PreflightError, UsageError
from launcher.records.records import LiveRunError, RecordStore, RunRecord
from launcher.types.plan import MEMORY_SETTINGS
from launcher.types.settings import Settings, Value

# Settings that decide which policy the checkpoints hold; all others may be changed.
_FIXED = (
    "dtype", "train.lora.rank", "train.lora.alpha", "train.lora.use_rslora", "train.lora.target_modules"
)  # fmt: skip
# Settings that the machine decides if no source sets them: GPUs have other defaults than a CPU, and memory is
# planned.
_BY_MACHINE = ("dtype", "engines", "train_processes", *MEMORY_SETTINGS)
# Defaults of the first versions, which wrote them into the record as if they had been set.
_OLD_DEFAULTS = {"engine.kv_cache_gib": 1.0, "engine.max_num_seqs": 64, "train.pack_tokens": 4096}
_RENTED, _OWN_GPUS, _CPU = "rented GPUs", "this computer's own GPUs", "this computer"
# Settings of ours that a resumed run keeps, and the field of Settings each one is.
_RECORDED = {
    "model": "model",
    "max": "max_seconds",
    "lease": "lease_seconds",
    "budget": "budget",
    "port": "port",
    "openai_env": "openai_env",
    "arbor": "arbor",
    "art": "art",
    "wandb": "wandb",
    "trackio": "trackio",
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


def find(store: RecordStore, id_or_name: str) -> RunRecord:
    """Its record. Raises UsageError for an unknown run, and for one whose `launch` lives, here or
    elsewhere."""
    record = store.load(id_or_name)
    if record.live and (record.elsewhere or record.launch_alive):
        raise LiveRunError(record)
    return record


def working_folder(record: RunRecord) -> Path | None:
    """The folder its command ran in. Raises PreflightError when that is gone."""
    folder = record.details.get("folder")
    if folder is None:
        return None
    if not Path(folder).is_dir():
        label = record.name or record.id
        raise PreflightError(
            f"{label} ran its program in {folder}",
            "that folder no longer exists",
            f"launch --resume {label} -- COMMAND  # runs it in this folder",
        )
    return Path(folder)


def record_details(settings: Settings, model_path: str, folder: Path | None = None) -> dict[str, Any]:
    """The details that a record keeps for a resume; the program runs in `folder`, or here."""
    kept = {key: settings.values[key].value for key in _RECORDED}
    # A relative folder would be another one elsewhere; an embedded model moves with the package.
    kept["model"] = settings.model if embedded_models.is_embedded(settings.model) else model_path
    known = _runtime_keys()
    runtime = {
        key: value.value
        for key, value in settings.values.items()
        if key in known and not (settings.gpus and key in _BY_MACHINE and value.source == "default")
    }
    recorded = [settings.values[key] for key in (*kept, *runtime)]
    sources = {
        key: value.source
        for key, value in zip((*kept, *runtime), recorded, strict=True)
        if value.source != "default"
    }
    return {
        "settings": kept,
        "runtime": runtime,
        "sources": sources,
        "model_path": model_path,
        "adapter": str(settings.adapter.folder) if settings.adapter else None,
        "folder": str(folder or Path.cwd()),
    }


def merge_settings(given: Settings, record: RunRecord) -> Settings:
    """The run's recorded settings, overridden by those on the command line.

    Raises UsageError for a setting that would train another policy than its checkpoints hold.
    """
    kept: Mapping[str, Any] = record.details.get("settings", {})
    runtime: Mapping[str, Any] = {
        key: value
        for key, value in _with_new_names(record.details.get("runtime", {})).items()
        if not (kept.get("gpus") and key in MEMORY_SETTINGS and _OLD_DEFAULTS.get(key) == value)
    }
    label = record.name or record.id
    if given.name is not None and given.name != record.name:
        raise UsageError(
            f"{label} keeps its name",
            f"--name {given.name} is a different name",
            f"launch --resume {label}",
            without=("name",),
        )
    values = dict(given.values)
    if given.adapter is not None and _is_on_command_line(values["model"]):
        raise cannot_change(label, "model", f"the adapter {given.adapter.folder}", str(kept.get("model")))
    recorded = {key: value for key, value in {**kept, **runtime}.items() if key in values}
    for key, value in recorded.items():
        if not _is_on_command_line(values[key]):
            values[key] = Value(value, f"the record of {label}")
    for key in _FIXED:
        if key in recorded and _typed(key, values[key].value) != _typed(key, recorded[key]):
            raise cannot_change(label, key, f"{key} = {values[key].value}", f"{recorded[key]}")
    fields = {field: values[key].value for key, field in _RECORDED.items()}
    overrides = {**given.runtime, **{key: values[key].value for key in runtime if key in values}}
    # The adapter or model that the run once began with is in its checkpoints.
    return replace(given, **fields, name=record.name, runtime=overrides, values=values, adapter=None)


def check_same_kind(settings: Settings, record: RunRecord) -> None:
    """Raises UsageError unless a resumed run stays on its kind of machine, if it got one."""
    wanted = _RENTED if settings.rented else _OWN_GPUS if settings.own_gpus else _CPU
    if not record.machine or (was := _kind(record.machine)) == wanted:
        return
    label = record.name or record.id
    raise UsageError(
        f"{label} cannot be resumed on {wanted}",
        f"it was started on {was}; its adapter is in its results/adapter",
        f"launch --resume {label}  # without --gpus and --infra",
        without=("gpus", "infra"),
    )


def _kind(machine: Mapping[str, Any]) -> str:
    """Where a described machine computes, in words."""
    if machine.get("kind") == "cloud":
        return _RENTED
    return _OWN_GPUS if machine.get("variant") == "cuda" else _CPU


def cannot_change(label: str, key: str, wanted: str, was: str) -> UsageError:
    """The error for a setting that would change the trained policy; `key` names it."""
    return UsageError(
        f"{label} cannot be resumed with {wanted}",
        f"it was started with {was}, and its checkpoints hold that policy",
        f"launch --resume {label}  # or a new run, without --resume",
        without=(key, "from") if key == "model" else (key,),
    )


def _is_on_command_line(value: Value) -> bool:
    """Whether it was set on this command line."""
    return value.source.startswith("--")


def _with_new_names(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """An older run's settings: who kept no completions keeps no rollouts."""
    keeps_none = runtime.get("completions_per_step") == 0
    return dict(runtime) | ({"logged_rollouts": 0} if keeps_none else {})


def _runtime_keys() -> set[str]:
    from launcher.config import runtime_config

    return set(runtime_config.defaults())


def _typed(key: str, value: Any) -> Any:
    """The value as the runtime reads it: "16" of a command line is 16."""
    from launcher.config import runtime_config

    ours = dict.fromkeys(("run_id", "model_path", "state_dir", "socket_dir"), "-")
    found: Any = runtime_config.build({key: value}, **ours)
    for room in key.split("."):
        found = getattr(found, room)
    return found
