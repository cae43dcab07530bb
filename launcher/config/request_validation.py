"""Reads the request of a run and validates it, before anything starts.

The request is the settings of every source, the command, and the run to resume. Neighbours:
`setting_sources.py` reads the sources, `resume_source.py` the settings of a resumed run, `preflight.py` has
the checks; `launching.py` calls for a run, `plan_verb.py` for a plan. Ends nothing and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends import local_gpus
from launcher.base import credentials
from launcher.base.errors import ConfigError, PreflightError, UsageError
from launcher.base.home import Home
from launcher.base.suggestions import closest_match
from launcher.config import (
    ports,
    preflight,
    price_agreement,
    program_check,
    remote_tools,
    resume_source,
    runtime_config,
    setting_sources,
)
from launcher.models import adapter_folder, hub, model_config
from launcher.models.model_config import FoundConfig
from launcher.records.endpoint import keyless_option, wanted_port
from launcher.records.records import RecordStore, RunRecord
from launcher.results import trackio_process
from launcher.types.offers import plan_command
from launcher.types.plan import refuse_rental_options, split_local_gpus
from launcher.types.settings import Settings
from runtime.shared import model_shape
from runtime.shared.architectures import PolicyError, check_dtype_on_cpu, check_on_cpu, checked_context
from runtime.shared.peft_format import Lora

_LAYERS = "train.lora.target_modules"


@dataclass(frozen=True)
class ParsedRequest:
    """Without a `command` the endpoint is held. `folder`: the command's folder, None for this one.
    `earlier`: the record of the run to resume, None for a new run."""

    settings: Settings
    command: tuple[str, ...] = ()
    folder: Path | None = None
    earlier: RunRecord | None = None


def read_request(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    home: Home,
    say: Callable[[str], None],
) -> tuple[ParsedRequest, str]:
    """The request, and its model as `validate` finds it; errors are those of the two."""
    parsed = parse_request(flags, sets, env_file, command, home)
    return parsed, validate(parsed, home, say)


def parse_request(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    home: Home,
) -> ParsedRequest:
    """The flag `resume` names a run to resume: its record's values hold unless they are given again.

    Only reads: nothing is checked against this computer. Raises LaunchError for values that cannot be read,
    contradict each other, or would train another policy than that run's.
    """
    if flags.get("resume") is None:
        settings = setting_sources.load(flags, sets, env_file, home=home, command=command)
        return ParsedRequest(settings, command)
    settings = setting_sources.load(flags, sets, env_file, home=home)
    earlier = resume_source.find(RecordStore(home), flags["resume"])
    settings = resume_source.merge_settings(settings, earlier)
    if command or not earlier.command:
        return ParsedRequest(settings, command, None, earlier)
    return ParsedRequest(settings, earlier.command, resume_source.working_folder(earlier), earlier)


def validate(parsed: ParsedRequest, home: Home, say: Callable[[str], None] = lambda line: None) -> str:
    """The model's folder, or its name on the hub. Raises LaunchError for the first thing that cannot work;
    doubts are warnings."""
    settings, earlier = parsed.settings, parsed.earlier
    refuse_rental_options(settings)
    price_agreement.refuse_without_consent(settings)
    rented = settings.rented
    if rented:
        remote_tools.check_tools()
    else:
        preflight.check_platform()
    if settings.own_gpus:
        local_gpus.choose(split_local_gpus(settings).needs("cuda"), os.environ)
    if earlier is None:
        RecordStore(home).check_name(settings.name)
    else:
        resume_source.check_same_kind(settings, earlier)
    preflight.check_command(_relative_to(parsed.folder, parsed.command), parsed.folder)
    preflight.check_import_shadowing(parsed.command, parsed.folder, arbor=settings.arbor)
    if doubt := program_check.check(parsed.command, parsed.folder, os.environ, arbor=settings.arbor):
        say(doubt)
    secrets = secret_values(settings)
    model_path = preflight.find_model(settings.model, secrets, here=not rented)
    _check_model_settings(settings, secrets)
    if earlier is not None:
        _check_model(model_path, earlier, secrets)
    if (port := wanted_port(settings)) is not None:
        ports.check_port(port, home, keyless_option=keyless_option(settings))
    preflight.check_wandb(settings, os.environ)
    if settings.trackio:
        trackio_process.check(str(settings.values["wandb_project"].value))
    preflight.check_folders(home)
    preflight.check_disk(settings, model_path, home)
    if not rented:
        # Last, because only this may ask the network.
        preflight.check_runtime_environment(home, "cuda" if settings.own_gpus else "cpu")
    return model_path


def secret_values(settings: Settings) -> dict[str, str]:
    """The secrets of a run, for its runtime; they are hidden in all output."""
    credentials.hide_secrets_of(os.environ)
    return {name: secret.value for name, secret in settings.secrets.items()}


def validate_plan(settings: Settings, *, asks: bool) -> None:
    """The checks of a plan: those of a run's model that need no network. `asks`: whether the hub may be
    asked, because it answered before.

    Raises LaunchError as a run does.
    """
    secrets = secret_values(settings)
    model_path = preflight.find_model(settings.model, secrets, asks=False)
    found = model_config.find_config(settings.model, os.environ, secrets.get("HF_TOKEN"), asks=asks)
    if found is not None and not os.path.isabs(model_path):
        hub.check_config(model_path, found.config)
    _check_model_fits_settings(settings, found)


def _check_model_settings(settings: Settings, secrets: Mapping[str, str]) -> None:
    """Check the settings that depend on the model; without such settings the hub is not asked for its
    config.json."""
    values = runtime_config.user_values(settings.runtime)
    asks = bool(settings.adapter or values.engine.max_model_len or values.train.lora.target_modules)
    _check_model_fits_settings(
        settings, model_config.find_config(settings.model, os.environ, secrets.get("HF_TOKEN"), asks=asks)
    )


def _check_model_fits_settings(settings: Settings, found: FoundConfig | None) -> None:
    """That the model can be used as it was asked: its adapter, its context, the layers with LoRA."""
    values = runtime_config.user_values(settings.runtime)
    config = found.config if found else None
    if settings.adapter is not None:
        chosen = values.train.lora
        lora = Lora(chosen.rank, chosen.alpha, chosen.use_rslora, chosen.target_modules or ())
        adapter_folder.check(settings.adapter, lora, config)
    if settings.gpus is None:
        _check_on_cpu(settings, config or {}, values.dtype)
    _check_context(config or {}, values.engine.max_model_len)
    _check_layers(settings, config or {}, values.train.lora.target_modules or ())


def _check_on_cpu(settings: Settings, config: Mapping[str, Any], dtype: str) -> None:
    """Raises PreflightError for a model on which the CPU engine would fail at its first request."""
    try:
        check_on_cpu(config)
    except PolicyError as error:
        hint = f"{plan_command(settings, 'H100:1')}  # GPUs take other widths"
        what = f"the model {settings.model} cannot be served on a CPU"
        raise PreflightError(what, str(error), hint) from None
    try:
        check_dtype_on_cpu(config, dtype)
    except PolicyError as error:
        what = f"the model {settings.model} cannot be served on a CPU in {dtype}"
        raise PreflightError(what, str(error), "launch --set dtype=bfloat16") from None


def _check_context(config: Mapping[str, Any], max_model_len: int | None) -> None:
    """The engine would refuse a longer one than the model has: on a machine that is paid for already."""
    try:
        checked_context(config, max_model_len)
    except PolicyError as error:
        raise PreflightError(
            f"the context cannot be {max_model_len} tokens",
            str(error),
            "leave engine.max_model_len out, or set it lower",
        ) from None


def _check_layers(settings: Settings, config: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """The trainer would refuse a name that none of the model's layers has."""
    there = model_shape.linear_names(config)
    wrong = [name for name in chosen if there is not None and name not in there]
    if there is None or not wrong:
        return
    source = settings.values[_LAYERS].source
    meant = dict.fromkeys(name if name in there else closest_match(name, there) for name in chosen)
    names = ",".join(name for name in meant if name) or ",".join(there)
    error = UsageError if source.startswith("--") else ConfigError
    place = source if _LAYERS in source else f"{source}: {_LAYERS}"
    raise error(
        f"{place}: {settings.model} has no {', '.join(wrong)}",
        f"its linear layers are {', '.join(there)}",
        f"launch --set {_LAYERS}={names}",
    )


def _relative_to(folder: Path | None, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command as this folder sees it: `./train.sh` of another one."""
    if folder is None or not command or os.sep not in command[0]:
        return command
    return (str(folder / command[0]), *command[1:])


def _check_model(model_path: str, record: RunRecord, secrets: Mapping[str, str]) -> None:
    """An embedded model may have moved with the package; any other one is known by its place."""
    was = record.details.get("settings", {}).get("model", model_path)
    if preflight.find_model(was, secrets) != model_path:
        label = record.name or record.id
        raise resume_source.cannot_change(label, "model", f"the model {model_path}", str(was))
