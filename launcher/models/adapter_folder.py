"""Finds the LoRA adapter that `--model` names, its base model, and whether a run can train it.

Neighbours: `setting_sources.py` asks what `--model` names, `run_request.py` has it checked before a run,
`run.py` brings it to the machine. Its form is PEFT's (`runtime/shared/peft_format.py`). Reads no tensors,
only their header.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from launcher.base import embedded_models
from launcher.base.errors import PreflightError
from launcher.models import model_folder
from launcher.types.adapter import Adapter
from runtime.shared import model_shape
from runtime.shared.peft_format import (
    CONFIG,
    WEIGHTS,
    Lora,
    PolicyError,
    check_adapter_config,
    portable_name,
    tensor_shapes,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_CONFIG_BYTES = 1_000_000
_RECORD = "record.json"
# `machine/checkpoints/step-000007/adapter` below a run's folder.
_MAX_DEPTH = 4


def find_adapter(model: str) -> Adapter | None:
    """The adapter that `--model` names; None if it names something else.

    Raises PreflightError for an adapter whose format cannot be read or whose base is unknown.
    """
    try:
        folder = Path(model).expanduser().absolute()
        if not (folder / CONFIG).is_file() or any(folder.glob("model*.safetensors")):
            return None
    except (OSError, RuntimeError, ValueError):  # no name of a folder: the search for the model reports it
        return None
    config = _read(folder)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        kind = config.get("peft_type")
        _refuse(folder, f"{CONFIG} has no r and lora_alpha, so it is not a LoRA (peft_type {kind!r})")
    return Adapter(
        folder,
        _base(folder, config),
        rank,
        float(alpha),
        bool(config.get("use_rslora")),
        _targets(config),
        config,
    )


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that it names one by one, sorted; of a pattern none."""
    names = config.get("target_modules")
    return tuple(sorted(str(name) for name in names)) if isinstance(names, list) else ()


def check(adapter: Adapter, lora: Lora, base_config: Mapping[str, Any] | None) -> None:
    """The whole folder, against the run's LoRA, and the base's config.json where it is at hand.

    Raises PreflightError: the trainer would refuse it too, when the machine is paid for.
    """
    folder = adapter.folder
    if (adapter.rank, adapter.alpha) != (lora.rank, lora.alpha):
        _refuse_other_shape(
            folder,
            f"has rank {adapter.rank} and alpha {adapter.alpha:g}",
            f"train.lora.rank is {lora.rank} and train.lora.alpha {lora.alpha:g}",
        )
    if adapter.use_rslora != lora.use_rslora:
        expected = f"train.lora.use_rslora is {str(lora.use_rslora).lower()}"
        _refuse_other_shape(
            folder, f"was trained with use_rslora={str(adapter.use_rslora).lower()}", expected
        )
    if not adapter.target_modules:
        named = adapter.config.get("target_modules")
        _refuse(folder, f"{CONFIG} lists no target_modules by name ({named!r})")
    if sorted(lora.target_modules) != sorted(adapter.target_modules):
        expected = f"train.lora.target_modules is {', '.join(lora.target_modules)}"
        _refuse_other_shape(folder, f"is on {', '.join(adapter.target_modules)}", expected)
    try:
        check_adapter_config(dict(adapter.config), lora)
    except PolicyError as error:
        _refuse(folder, str(error))
    except (KeyError, TypeError) as error:
        _refuse(folder, f"{CONFIG} is not PEFT's: {error}")
    _check_weights(folder)
    _check_shapes(adapter, base_config)


def _refuse_other_shape(folder: Path, what: str, expected: str) -> NoReturn:
    raise PreflightError(
        f"the adapter {folder} {what}",
        f"{expected}: an adapter keeps its own",
        f"launch --model {folder}  # without these settings: the adapter's own",
        without=[f"train.lora.{it}" for it in ("rank", "alpha", "use_rslora", "target_modules")],
    )


def _check_weights(folder: Path) -> None:
    if not (folder / WEIGHTS).is_file():
        found = "; weights in other formats are not supported" if any(folder.glob("adapter_model.*")) else ""
        _refuse(folder, f"it has no {WEIGHTS}{found}")
    if reason := model_folder.broken_safetensors(folder / WEIGHTS):
        _refuse(folder, f"{WEIGHTS}: {reason}", "copy the adapter again: launch pull RUN")


def _check_shapes(adapter: Adapter, base_config: Mapping[str, Any] | None) -> None:
    """For a family whose layers are known by its config.json; for others the trainer reports a mismatch."""
    if base_config is None or model_shape.linear_names(base_config) is None:
        return
    found_shape = model_shape.shape(base_config)
    if found_shape is None:
        return
    own = {linear.name for _, linear in found_shape.with_lora(adapter.target_modules)}
    if missing := sorted(set(adapter.target_modules) - own):
        _refuse(adapter.folder, f"no layer of its base is called {missing[0]}")
    wanted = tensor_shapes(found_shape, adapter.rank, adapter.target_modules)
    found = model_folder.safetensors_shapes(adapter.folder / WEIGHTS)
    odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if odd:
        why = f"{len(odd)} of its tensors do not fit {adapter.base}, such as {odd[0]}"
        _refuse(adapter.folder, f"{why}: {found.get(odd[0], 'missing')}, not {wanted.get(odd[0], 'there')}")


def _read(folder: Path) -> dict[str, Any]:
    try:
        with (folder / CONFIG).open(encoding="utf-8") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        _refuse(folder, f"{CONFIG} cannot be read: {error}", f"less {folder / CONFIG}")
    if not isinstance(config, dict):
        _refuse(folder, f"{CONFIG} is not a JSON object", f"less {folder / CONFIG}")
    return config


def _base(folder: Path, config: Mapping[str, Any]) -> str:
    """Its base model, as a value for `--model`. Raises PreflightError."""
    name = config.get("base_model_name_or_path")
    hint = f"write its base's hub name or folder into base_model_name_or_path of {folder / CONFIG}"
    if not isinstance(name, str) or not name.strip():
        _refuse(folder, "it does not name its base model", hint)
    if embedded_models.is_embedded(name):
        return name
    with contextlib.suppress(OSError, ValueError):  # no path at all
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser().absolute())
    if (model := _base_of_its_run(folder, name)) is not None:
        return model
    if _HUB_NAME.fullmatch(name):
        return name
    _refuse(folder, f"its base {name!r} is neither a hub name nor a folder on this computer", hint)


def _base_of_its_run(folder: Path, name: str) -> str | None:
    """The model of the run in whose folder it is, among its results or its checkpoints, if it names that."""
    above = next(
        (place for place in list(folder.parents)[:_MAX_DEPTH] if (place / _RECORD).is_file()), folder
    )
    try:
        record = json.loads((above / _RECORD).read_text(encoding="utf-8"))
        model = record["details"]["model_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = isinstance(model, str) and portable_name(model) == name and Path(model).is_dir()
    return model if known else None


def _refuse(folder: Path, why: str, hint: str | None = None) -> NoReturn:
    raise PreflightError(f"the adapter {folder} cannot be used", why, hint or f"ls -l {folder}")
