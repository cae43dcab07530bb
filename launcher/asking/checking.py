"""Whether what was asked can work, as far as that can be known before anything starts.

Neighbours: `reading.py` says what was asked, `preflight.py` has the checks, `launching.py` calls. Ends
nothing and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher.asking import agreement, earlier_run, preflight
from launcher.asking.reading import Asked
from launcher.base import credentials
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.ledger.records import RecordStore, RunRecord
from launcher.machines import own_gpus
from launcher.values.plan import own_shares, refuse_what_is_rented_only
from launcher.values.settings import Settings
from runtime.shared.architectures import PolicyError, checked_context
from runtime.shared.peft_form import Lora


def check(asked: Asked, home: Home) -> str:
    """The model's folder, or its name on the hub. Raises LaunchError for the first thing that cannot work."""
    settings, earlier = asked.settings, asked.earlier
    refuse_what_is_rented_only(settings)
    agreement.refuse_unasked(settings)
    rented = settings.rented
    if rented:
        preflight.check_tools()
    else:
        preflight.check_platform()
    if settings.own_gpus:
        own_gpus.choose(own_shares(settings).needs("cuda"), os.environ)
    if earlier is None:
        RecordStore(home).check_name(settings.name)
    else:
        earlier_run.check_same_kind(settings, earlier)
    preflight.check_command(_seen_from(asked.folder, asked.command), asked.folder)
    preflight.check_names(asked.command, asked.folder)
    secrets = secret_values(settings)
    model_path = preflight.find_model(settings.model, secrets, here=not rented)
    _check_adapter(settings, model_path, secrets)
    _check_context(settings, secrets)
    if earlier is not None:
        _check_model(model_path, earlier, secrets)
    if settings.port is not None:
        preflight.check_port(settings.port, home)
    preflight.check_wandb(settings, os.environ)
    preflight.check_folders(home)
    preflight.check_disk(settings, model_path, home)
    if not rented:
        # Last, because only this may ask the network.
        preflight.check_environment(home, "cuda" if settings.own_gpus else "cpu")
    return model_path


def secret_values(settings: Settings) -> dict[str, str]:
    """The secrets of a run, to be handed to its runtime; they are hidden from all that is written."""
    credentials.hide_environment(os.environ)
    return {name: secret.value for name, secret in settings.secrets.items()}


def _check_adapter(settings: Settings, model_path: str, secrets: Mapping[str, str]) -> None:
    if settings.adapter is None:
        return
    from launcher.models import adapter_folder, hub, model_folder

    here = Path(model_path) / "config.json"
    base = model_folder.read_config(here) if here.is_file() else None
    if base is None:
        base = hub.config_of(model_path, os.environ, secrets.get("HF_TOKEN"))
    from launcher.asking import runtime_config

    asked = runtime_config.of_user(settings.runtime).train.lora
    lora = Lora(asked.rank, asked.alpha, asked.use_rslora, asked.target_modules or ())
    adapter_folder.check(settings.adapter, lora, base)


def _check_context(settings: Settings, secrets: Mapping[str, str]) -> None:
    """The engine would refuse a longer one than the model has: on a machine that is paid for already."""
    from launcher.asking import runtime_config
    from launcher.models import model_config

    asked = runtime_config.of_user(settings.runtime).engine.max_model_len
    found = model_config.of(settings.model, os.environ, secrets.get("HF_TOKEN")) if asked else None
    try:
        checked_context(found.config if found else {}, asked)
    except PolicyError as error:
        raise PreflightError(
            f"the context cannot be {asked} tokens",
            str(error),
            "leave engine.max_model_len out, or set it lower",
        ) from None


def _seen_from(folder: Path | None, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command as this folder sees it: `./train.sh` of another one."""
    if folder is None or not command or os.sep not in command[0]:
        return command
    return (str(folder / command[0]), *command[1:])


def _check_model(model_path: str, record: RunRecord, secrets: Mapping[str, str]) -> None:
    """The embedded model may have moved with the package; any other one is known by its place."""
    was = record.details.get("settings", {}).get("model", model_path)
    if preflight.find_model(was, secrets) != model_path:
        raise earlier_run.refused(record.name or record.id, f"the model {model_path}", str(was))
